"""The tables and the picture of `benchmarks.convergence`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from benchmarks.convergence.arms import ADAM, ONEBIT_ADAM

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from benchmarks.convergence.run import Run
    from benchmarks.convergence.study import Study


def beside(runs: Sequence[Run], adam: Sequence[Run]) -> float | None:
    """The excess of a mean loss over Adam's, of the seeds that both have.

    Args:
      runs: The runs of an arm.
      adam: Those of Adam.

    Returns:
      A share of Adam's; None where they have no seed in common.
    """
    losses = {run.case.seed: run.loss for run in adam}
    pairs = [(r.loss, losses[r.case.seed]) for r in runs if r.case.seed in losses]
    if not pairs:
        return None
    mean, of_adam = map(statistics.mean, zip(*pairs, strict=True))
    return mean / of_adam - 1


def text(study: Study) -> str:
    """The final held-out losses as Markdown tables.

    Args:
      study: The study so far.

    Returns:
      A table each for tuning, arms, workers and freeze steps that have runs.
    """
    parts = [_tuning(study), _arms(study), _workers(study), _freezes(study)]
    return "\n\n".join(part for part in parts if part)


def _tuning(study: Study) -> str:
    tuning = {arm: runs for arm, runs in study.tuning.items() if runs}
    rates = sorted({r.case.learning_rate for runs in tuning.values() for r in runs})
    rows = [
        [f"{rate:g}", *(_loss_at(rate, runs) for runs in tuning.values())]
        for rate in rates
    ]
    return _table(["learning rate", *tuning], rows)


def _loss_at(rate: float, runs: Sequence[Run]) -> str:
    return " ".join(_nats(r.loss) for r in runs if r.case.learning_rate == rate)


def _arms(study: Study) -> str:
    adam = study.arms[ADAM]
    if not adam:
        return ""
    rows = [
        [arm, *_cells(runs, adam), _megabytes(runs[0])]
        for arm, runs in study.arms.items()
        if runs
    ]
    if study.tuned_onebit:
        rate = study.tuned_onebit[0].case.learning_rate
        rows.insert(
            2,
            [
                f"{ONEBIT_ADAM} at its own best, {rate:g}",
                *_cells(study.tuned_onebit, adam),
                _megabytes(study.tuned_onebit[0]),
            ],
        )
    return _table(
        [
            f"all at {adam[0].case.learning_rate:g}",
            "seeds",
            "mean",
            "beside Adam",
            "MB a worker sent",
        ],
        rows,
    )


def _cells(runs: Sequence[Run], adam: Sequence[Run]) -> list[str]:
    mean = statistics.mean(run.loss for run in runs)
    return [
        " ".join(_nats(run.loss) for run in runs),
        _nats(mean),
        _percent(beside(runs, adam)),
    ]


def _workers(study: Study) -> str:
    rows = [
        [
            str(workers),
            *(" ".join(_nats(run.loss) for run in runs) for runs in pair.values()),
            _percent(beside(pair[ONEBIT_ADAM], pair[ADAM])),
        ]
        for workers, pair in study.workers.items()
        if pair[ONEBIT_ADAM]
    ]
    if len(rows) < 2:
        return ""
    return _table(["workers", ADAM, ONEBIT_ADAM, "beside Adam"], rows)


def _freezes(study: Study) -> str:
    if len(study.freezes) < 2:
        return ""
    rows = [
        [
            f"{run.frozen_at} ({run.frozen_at / study.steps:.1%})"
            + (", by `freeze_when_stable`" if run.case.freeze == "auto" else ""),
            _nats(run.loss),
            _percent(beside([run], study.arms[ADAM])),
            _megabytes(run),
        ]
        for run in sorted(study.freezes, key=lambda run: run.frozen_at)
    ]
    return _table(["frozen at", "loss", "beside Adam", "MB a worker sent"], rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _nats(loss: float) -> str:
    return f"{loss:.4f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.2%}"


def _megabytes(run: Run) -> str:
    return f"{run.sent_bytes / 1e6:,.0f}"


def write_picture(file: Path, study: Study) -> None:
    """Draws each arm's mean held-out loss with a band from its best to its worst seed.

    Args:
      file: The PNG.
      study: The study so far.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for arm, runs in study.arms.items():
        if not runs:
            continue
        at = list(runs[0].eval_losses)
        rows = list(zip(*(run.eval_losses.values() for run in runs), strict=True))
        axes.plot(at, [statistics.mean(row) for row in rows], label=arm)
        axes.fill_between(at, list(map(min, rows)), list(map(max, rows)), alpha=0.2)
    axes.axvline(study.freeze_step, color="grey", linestyle=":", label="freeze")
    axes.set(xlabel="step", ylabel="held-out loss (nats)", xlim=(0, study.steps))
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
