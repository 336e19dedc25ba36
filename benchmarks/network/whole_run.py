"""Whole runs of a study's arms on slow links: the seconds until Adam's last loss.

    python -m benchmarks.network --hosts 4 --rates 100mbit --plan FILE --json STEPS
    python -m benchmarks.network.whole_run FILE STEPS --task NAME --page PAGE

The study says what an arm has learnt after how many steps of which stages; the first
command measures a step of each of these stages, of the BERT of its --model, on the
testbed's limited links. A run is the sum of its steps' seconds. These links have no
latency: `--latency-ms` adds one by the planner's model, in which messages that wait
for one another each take it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import tyro

from benchmarks.convergence.intervals import beside
from benchmarks.convergence.plan import read_plan
from benchmarks.convergence.report import mean_loss, percent, runs_of
from benchmarks.convergence.runs import Store
from benchmarks.network.results import BASELINES, read_results
from benchmarks.page import fill, table
from train.core.totals import EVERY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.convergence.runs import Run
    from benchmarks.network.results import Measurement

MARK = "whole runs"
"""The part of a page that the table goes to."""
HEADS = (
    "optimizer",
    "loss beside Adam",
    "fewer bytes",
    "hours",
    "faster than Adam",
    "steps to Adam's last loss",
    "hours",
    "faster than Adam",
)


class WholeRun(NamedTuple):
    """An arm's runs on the testbed's links.

    Attributes:
      runs: Those of the study.
      seconds: From the step of each evaluation to the seconds until then.
      reached: The first of these steps with the baseline's last mean loss, or less;
        None for none.
    """

    runs: Sequence[Run]
    seconds: Mapping[int, float]
    reached: int | None

    @property
    def whole(self) -> float:
        """Seconds of the whole run."""
        return max(self.seconds.values())


def whole_runs(
    runs: Mapping[str, Sequence[Run]],
    rows: Sequence[Measurement],
    latency: float = 0.0,
) -> dict[str, WholeRun]:
    """A task's runs by arm, the baseline's first, at the steps' seconds.

    Args:
      runs: The study's.
      rows: Steps of each stage of its arms.
      latency: Seconds that a message takes beside its bytes.
    """
    medians = {
        (row.name, row.stage or EVERY): row.median + (row.rounds or 0) * latency
        for row in rows
    }
    baseline, *others = runs
    names = {baseline: BASELINES["step"]} | {arm: arm for arm in others}
    target = mean_loss(runs[baseline])
    found = {}
    for arm, own in runs.items():
        seconds = {
            # The steps of a part of a stage are those of the stage's program.
            step: sum(
                number * medians[names[arm], stage.partition("/")[0]]
                for stage, number in taken.items()
                if number
            )
            for step, taken in own[0].stages.items()
        }
        reached = [step for step in seconds if mean_loss(own, step) <= target]
        found[arm] = WholeRun(own, seconds, min(reached, default=None))
    return found


def text(found: Mapping[str, WholeRun]) -> str:
    """The runs as a Markdown table, the baseline's first."""
    baseline, *_ = found.values()
    first = baseline.seconds[baseline.reached or max(baseline.seconds)]

    def time(seconds: float, beside: float) -> tuple[str, str]:
        return f"{seconds / 3600:.2f}", f"{beside / seconds:.1f}"

    rows = []
    for arm, each in found.items():
        worse = "" if each is baseline else percent(beside(each.runs, baseline.runs))
        fewer = baseline.runs[0].sent_bytes / each.runs[0].sent_bytes
        until = ["", "", ""]
        if each.reached is not None:
            until = [f"{each.reached:,}", *time(each.seconds[each.reached], first)]
        whole = time(each.whole, baseline.whole)
        rows.append([arm, worse, f"{fewer:.1f}", *whole, *until])
    return table(HEADS, rows)


def read(
    plan: Path,
    steps: Path,
    task: str,
    rate: str | None = None,
    arms: Sequence[str] = (),
) -> tuple[dict[str, list[Run]], list[Measurement]]:
    """A task's runs of a study by arm, the baseline's first, and the steps of its arms.

    They are those of the last round that has all of the arms that are named.

    Raises:
      SystemExit: The steps are of several rates, or the study has no such task, no
        round of these arms or no run of its baseline.
    """
    study = read_plan(plan)
    rows = [row for row in read_results(steps).rows if row.kind == "step"]
    rows = [row for row in rows if rate in (None, row.rate)]
    if len({row.where for row in rows}) != 1:
        raise SystemExit(
            f"{steps} must have steps of one number of hosts, and of one rate or of "
            "that of --rate."
        )
    if task not in study.tasks:
        known = ", ".join(study.tasks)
        raise SystemExit(f"--task must be one of {known}, not {task!r}.")
    rounds = [each for each in study.rounds if set(arms) <= set(each.arms)]
    if not rounds:
        raise SystemExit(f"{plan} has no round of the arms {', '.join(arms)}.")
    done = Store(plan.with_suffix(".json"), study).runs
    runs = runs_of(study, rounds[-1], task, done)
    if study.baseline not in runs:
        raise SystemExit(
            f"{plan} has no run of {study.baseline!r} in {task!r} that has ended: run "
            "the study first."
        )
    wanted = (study.baseline, *(arms or runs))
    return {arm: runs[arm] for arm in runs if arm in wanted}, rows


def main(
    plan: Annotated[Path, tyro.conf.Positional],
    steps: Annotated[Path, tyro.conf.Positional],
    task: str,
    rate: str | None = None,
    arms: tuple[str, ...] = (),
    latency_ms: float = 0.0,
    mark: str = MARK,
    page: Path | None = None,
) -> None:
    """Says how long whole runs take.

    Args:
      plan: A study of `benchmarks.convergence`, whose JSON lies beside it.
      steps: The JSON that `python -m benchmarks.network --plan` wrote.
      task: The study's task whose runs they are.
      rate: Whose steps are taken, where the JSON has those of several.
      arms: The arms beside the baseline; all of the last round if none is named.
      latency_ms: Milliseconds that a message takes beside its bytes.
      mark: The part of the page.
      page: The page whose marks the table goes between.
    """
    runs, rows = read(plan, steps, task, rate, arms)
    if latency_ms and any(row.rounds is None for row in rows):
        raise SystemExit(f"{steps} does not say how often steps wait: measure again.")
    lines = text(whole_runs(runs, rows, latency_ms / 1e3))
    print(lines)
    if page is not None:
        page.write_text(fill(page.read_text("utf-8"), mark, lines), "utf-8")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmarks.network.whole_run")
