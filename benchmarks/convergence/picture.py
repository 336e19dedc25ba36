"""The picture of a study: held-out losses by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from benchmarks.convergence.arms import schedule_of
from benchmarks.convergence.report import runs_of
from benchmarks.convergence.tasks import read_flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from benchmarks.convergence.plan import Plan
    from benchmarks.convergence.runs import Case, Run

MOST_ARMS = 8
"""Lines that can be told from each other."""


def write_picture(file: Path, plan: Plan, done: Mapping[Case, Run]) -> None:
    """Draws the arms of the last round that has runs, each task by itself.

    Args:
      file: The plan, beside which the PNG is written.
      plan: What it says.
      done: The runs that have ended.
    """
    drawn: dict[str, dict[str, list[Run]]] = {}
    for each in plan.rounds:
        found = {task: runs_of(plan, each, task, done) for task in each.tasks}
        drawn = {task: runs for task, runs in found.items() if runs} or drawn
    if not drawn:
        return
    figure = Figure(figsize=(7 * len(drawn), 5), layout="constrained")
    subplots = figure.subplots(1, len(drawn), squeeze=False)[0]
    for axes, (task, runs) in zip(subplots, drawn.items(), strict=True):
        freeze = schedule_of(read_flags(plan.tasks[task])).freeze
        _draw(axes, task, runs, freeze)
    figure.savefig(file.with_suffix(".png"), dpi=120)


def _draw(
    axes: Axes, task: str, runs: Mapping[str, Sequence[Run]], freeze: int | str
) -> None:
    for arm, own in list(runs.items())[:MOST_ARMS]:
        steps = sorted(own[0].evaluations)
        curves = np.array(
            [[run.evaluations[step]["loss"] for step in steps] for run in own], float
        )
        axes.plot(steps, curves.mean(0), label=arm)
        axes.fill_between(steps, curves.min(0), curves.max(0), alpha=0.2)
    if isinstance(freeze, int):
        axes.axvline(freeze, color="grey", linestyle=":", label="freeze")
    axes.set(
        title=f"{task}: mean, and band from best to worst seed",
        xlabel="step",
        ylabel="held-out loss (nats)",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
