"""Does 1-bit Adam learn as Adam does? Held-out loss of a small BERT, arm by arm.

    python -m benchmarks.convergence --page docs/convergence.md

Adam's learning rate is tuned first; every arm is then trained at that rate, on the same
samples, from the same parameters, for several seeds. 1-bit Adam is tuned on the same
grid, and trained at its own best rate. Then other numbers of workers, each beside Adam,
and other freeze steps.

What the JSON already holds is not trained again, and a run that was interrupted goes on
from its newest checkpoint, exactly. The weights of every run stay in `--runs`.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from benchmarks.convergence.arms import ADAM, ARMS, ONEBIT_ADAM
from benchmarks.convergence.report import Study, text, write_picture
from benchmarks.convergence.run import Case, Freeze, Run, Shared, train, use_devices
from benchmarks.page import fill
from train.data.corpus import read_corpus, survey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Config:
    """What is compared."""

    shared: tyro.conf.OmitArgPrefixes[Shared] = dataclasses.field(
        default_factory=Shared
    )
    out: Path = Path("docs/convergence")
    """Where the JSON and the picture go, without their suffixes."""
    page: Path | None = None
    """The Markdown page between whose marks, named as the JSON, the tables go."""
    runs: Path = Path("runs/convergence")
    """Folder for the runs' checkpoints and weights."""
    learning_rates: tuple[float, ...] = (5e-4, 7e-4, 1e-3, 1.5e-3)
    """The grid that Adam and 1-bit Adam are tuned on, with the first seed."""
    seeds: tuple[int, ...] = (3, 4, 5)
    """Each decides the parameters, the samples and their order; others than those by
    which 1-bit Adam's defaults were chosen."""
    workers: int = 8
    """Virtual devices."""
    freeze_step: int = 300
    """Steps of the warm-up."""
    more_workers: tuple[int, ...] = (16, 32)
    """Other numbers of workers, for Adam and 1-bit Adam, with the first seed."""
    freezes: tuple[Freeze, ...] = (30, 75, 150, 450, "auto")
    """Other freeze steps, with the first seed; auto: once the variance is stable."""


class Runs:
    """The runs that have ended, in a JSON, and the training of those that have not."""

    def __init__(self, config: Config):
        self._config = config
        self._file = config.out.with_suffix(".json")
        self._folder = config.runs / config.out.name
        shared = dataclasses.asdict(config.shared)
        self._settings = {
            **shared,
            "corpus": [path.name for path in config.shared.corpus],
            "text": survey(read_corpus(config.shared.corpus)).fingerprint,
        }
        self._done: dict[Case, Run] = {}
        if self._file.exists():
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            if stored["settings"] != self._settings:
                raise SystemExit(
                    f"{self._file} is of other settings or text: remove it and "
                    f"{self._folder}, or change --out."
                )
            for values in stored["runs"]:
                run = _from_json(values)
                self._done[run.case] = run

    def done(self, cases: list[Case]) -> list[Run]:
        """Those of some cases that have ended."""
        return [self._done[case] for case in cases if case in self._done]

    def of(self, case: Case) -> Run:
        """The run of a case, trained if it must be."""
        if case not in self._done:
            # The number of devices is a process's own; a fresh one has not chosen yet.
            with ProcessPoolExecutor(
                max_workers=1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=use_devices,
                initargs=(case.workers,),
            ) as process:
                self._done[case] = process.submit(
                    train,
                    self._config.shared,
                    case,
                    self._folder / case.name,
                    self._folder / "tokens",
                ).result()
            self._write()
        return self._done[case]

    def _write(self) -> None:
        runs = [_to_json(run) for run in self._done.values()]
        stored = {"settings": self._settings, "runs": runs}
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        new.replace(self._file)


def _to_json(run: Run) -> dict[str, Any]:
    return {**run._asdict(), "case": run.case._asdict()}


def _from_json(values: dict[str, Any]) -> Run:
    losses = {int(step): loss for step, loss in values["eval_losses"].items()}
    return Run(**{**values, "case": Case(**values["case"]), "eval_losses": losses})


def study(config: Config, runs: Runs, report: Callable[[Study], None]) -> Study:
    """Trains what has not been trained.

    Args:
      config: What is compared.
      runs: Where the runs come from.
      report: Called with the study so far, once Adam is tuned and after each training.

    Returns:
      All of it.
    """
    first, at = config.seeds[0], (config.workers, config.freeze_step)

    def tuned(arm: str) -> list[Case]:
        return [Case(arm, rate, first, *at) for rate in config.learning_rates]

    def seeds(arm: str, rate: float) -> list[Case]:
        return [Case(arm, rate, seed, *at) for seed in config.seeds]

    def best(cases: list[Case]) -> float:
        ended = [runs.of(case) for case in cases]
        return min(ended, key=lambda run: run.loss).case.learning_rate

    rate = best(tuned(ADAM))
    arms = {arm: seeds(arm, rate) for arm in ARMS}
    several = {
        workers: {
            arm: [Case(arm, rate, first, workers, config.freeze_step)]
            for arm in (ADAM, ONEBIT_ADAM)
        }
        for workers in (config.workers, *config.more_workers)
    }
    freezes = [
        Case(ONEBIT_ADAM, rate, first, config.workers, freeze)
        for freeze in (*config.freezes, config.freeze_step)
    ]

    def own_best() -> list[Case]:
        cases = tuned(ONEBIT_ADAM)
        if len(runs.done(cases)) < len(cases):
            return []
        return seeds(ONEBIT_ADAM, best(cases))

    def ended() -> Study:
        return Study(
            steps=config.shared.steps,
            freeze_step=config.freeze_step,
            tuning={arm: runs.done(tuned(arm)) for arm in (ADAM, ONEBIT_ADAM)},
            arms={arm: runs.done(cases) for arm, cases in arms.items()},
            own_best=runs.done(own_best()),
            workers={
                n: {arm: runs.done(cases) for arm, cases in pair.items()}
                for n, pair in several.items()
            },
            freezes=runs.done(freezes),
        )

    def train_each(cases: Iterable[Case]) -> None:
        for case in cases:
            if not runs.done([case]):
                runs.of(case)
                report(ended())

    # A seed of all arms before the next, so that a study cut short compares them.
    def train_all(of_arms: dict[str, list[Case]]) -> None:
        train_each(chain(*zip(*of_arms.values(), strict=True)))

    report(ended())
    train_all(arms)
    train_each(tuned(ONEBIT_ADAM))
    train_each(own_best())
    train_each(freezes)
    for n in config.more_workers:
        train_all(several[n])
    return ended()


def main(config: Config) -> None:
    """Trains what the JSON lacks, and writes JSON, page and picture after each run."""
    if config.page:  # What is wrong with it is said before anything is trained.
        fill(config.page.read_text(encoding="utf-8"), config.out.name, "")

    def write(so_far: Study) -> None:
        if config.page:
            page = config.page.read_text(encoding="utf-8")
            filled = fill(page, config.out.name, text(so_far))
            config.page.write_text(filled, encoding="utf-8")
        write_picture(config.out.with_suffix(".png"), so_far)

    complete = study(config, Runs(config), write)
    write(complete)
    print(text(complete))
