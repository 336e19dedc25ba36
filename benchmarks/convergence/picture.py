"""The picture of a study: held-out losses by step, or by the bytes sent until then."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from benchmarks.convergence.report import runs_of
from benchmarks.convergence.study import of_hull, round_points
from benchmarks.convergence.tasks import read_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from benchmarks.convergence.frontier import Point
    from benchmarks.convergence.plan import Round, Study
    from benchmarks.convergence.runs import Case, Run

MOST_ARMS = 10
"""Lines that can be told from each other."""


def write_picture(file: Path, study: Study, done: Mapping[Case, Run]) -> None:
    """Writes the picture of a study beside its plan, once it has runs."""
    confirmed = [each for each in study.rounds if of_hull(study, each, done)]
    if confirmed:
        figure = drawn_frontier(study, confirmed[-1], done)
    else:
        figure = drawn_study(study, done)
    if figure is not None:
        figure.savefig(file.with_suffix(".png"), dpi=120)


def drawn_study(study: Study, done: Mapping[Case, Run]) -> Figure | None:
    """Draws the arms of the last seeds that have runs, each task by itself."""
    drawn: dict[str, dict[str, list[Run]]] = {}
    seeds = ()
    for each in study.rounds:
        found = {task: runs_of(study, each, task, done) for task in each.tasks}
        found = {task: runs for task, runs in found.items() if runs}
        if found and each.seeds != seeds:
            drawn, seeds = {}, each.seeds
        for task, runs in found.items():
            drawn[task] = drawn.get(task, {}) | runs
    if not drawn:
        return None
    figure = Figure(figsize=(7 * len(drawn), 5), layout="constrained")
    subplots = figure.subplots(1, len(drawn), squeeze=False)[0]
    arms = dict.fromkeys(arm for runs in drawn.values() for arm in runs)
    colours = {arm: f"C{i}" for i, arm in enumerate(arms)}
    for axes, (task, runs) in zip(subplots, drawn.items(), strict=True):
        axes.set(
            title=f"{task}: mean, and band from best to worst seed",
            ylabel="held-out loss (nats)",
        )
        if study.picture == "bytes":
            _draw(axes, runs, _megabytes, colours)
            axes.set(xlabel="MB that a worker has sent", xscale="log")
        else:
            _draw(axes, runs, _steps, colours)
            axes.set(xlabel="step")
            freeze = read_flags(study.tasks[task]).phases[0].freeze
            if isinstance(freeze, int):
                axes.axvline(freeze, color="grey", linestyle=":", label="freeze")
        axes.grid(alpha=0.3)
    # Beside ten lines there is no room for it in the picture itself.
    lines = {
        label: line
        for axes in subplots
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        [*lines.values()],
        [*lines],
        loc="outside lower center",
        ncols=2 if len(drawn) == 1 else 5,
        fontsize="small",
    )
    return figure


def drawn_frontier(study: Study, each: Round, done: Mapping[Case, Run]) -> Figure:
    """Draws what a round has confirmed, over all arms that it was chosen of."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    confirmed = round_points(study, each, done)
    chosen = of_hull(study, each, done)
    tried = [
        at
        for earlier in study.rounds
        if earlier.name in each.hull
        for at in round_points(study, earlier, done)
        if at.arm in earlier.product
    ]
    of_workers = {at.arm: study.arms[at.arm]["workers"] for at in tried}
    for i, workers in enumerate(sorted(set(of_workers.values()))):
        own = [at for at in tried if of_workers[at.arm] == workers]
        axes.plot(*_places(own), ".", color=f"C{i}", alpha=0.3)
        line = [
            at for at in confirmed if at.arm in chosen and of_workers[at.arm] == workers
        ]
        line.sort(key=lambda at: at.fewer)
        axes.errorbar(
            *_places(line),
            yerr=[100 * at.share.half_width for at in line],
            color=f"C{i}",
            marker="o",
            capsize=3,
            label=f"{workers} workers",
        )
    others = [at for at in confirmed if at.arm not in [*chosen, study.baseline]]
    for i, at in enumerate(others):
        if math.isfinite(at.fewer):
            axes.plot(*_places([at]), "*^sD"[i % 4], color="black", label=at.arm)
        else:
            label = f"{at.arm}: {at.share.mean:+.0%}"
            level = 100 * at.share.mean
            axes.axhline(level, color="black", linestyle="--", label=label)
    axes.axhline(0, color="grey", linestyle=":")
    highest = max((at.share.mean for at in confirmed if at not in others), default=0.0)
    axes.set(
        xlabel=f"times fewer bytes than {study.baseline}, over the whole run",
        ylabel=f"held-out loss beside tuned {study.baseline}, %",
        xscale="log",
        ylim=(None, 100 * max(1.3 * highest, 0.05)),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [at.fewer for at in points], [100 * at.share.mean for at in points]


def _draw(
    axes: Axes,
    runs: Mapping[str, Sequence[Run]],
    places: Callable[[Run], Mapping[int, float]],
    colours: Mapping[str, str],
) -> None:
    """The losses of some arms, at the place of the step of each evaluation."""
    for arm, own in list(runs.items())[:MOST_ARMS]:
        place = places(own[0])
        steps = sorted(place)
        curves = np.array(
            [[run.evaluations[step]["loss"] for step in steps] for run in own], float
        )
        x = [place[step] for step in steps]
        colour = colours[arm]
        axes.plot(x, curves.mean(0), color=colour, label=arm)
        axes.fill_between(x, curves.min(0), curves.max(0), color=colour, alpha=0.2)


def _steps(run: Run) -> dict[int, float]:
    return {step: step for step in run.evaluations}


def _megabytes(run: Run) -> dict[int, float]:
    return {step: sent / 1e6 for step, sent in run.sent_by_step().items()}
