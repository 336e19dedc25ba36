"""The table and the picture of `benchmarks.convergence`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.convergence import Run


def table(
    tuning: Sequence[Run], compared: Mapping[str, Sequence[Run]], steps: int
) -> str:
    """The final held-out losses as Markdown.

    Args:
      tuning: Adam's runs on the grid of learning rates.
      compared: Each arm's runs, a run a seed.
      steps: The step whose losses are shown.

    Returns:
      Two tables: Adam's tuning, and the arms.
    """
    last = str(steps)
    lines = ["| Adam's learning rate | held-out loss |", "|---|---|"]
    lines += [f"| {r.learning_rate:g} | {r.eval_losses[last]:.4f} |" for r in tuning]
    adam = statistics.mean(run.eval_losses[last] for run in compared["adam"])
    seeds = [run.seed for run in compared["adam"]]
    heads = " | ".join(f"seed {seed}" for seed in seeds)
    lines += [
        "",
        f"| arm | {heads} | mean | beside Adam | MB a worker sent |",
        "|---" * (len(seeds) + 4) + "|",
    ]
    for arm, runs in compared.items():
        losses = [run.eval_losses[last] for run in runs]
        mean = statistics.mean(losses)
        cells = " | ".join(f"{loss:.4f}" for loss in losses)
        lines.append(
            f"| {arm} | {cells} | {mean:.4f} | {mean / adam - 1:+.2%} | "
            f"{runs[0].sent_bytes / 1e6:.0f} |"
        )
    return "\n".join(lines)


def write_picture(
    file: Path, compared: Mapping[str, Sequence[Run]], freeze_step: int, steps: int
) -> None:
    """Draws each arm's mean held-out loss with a band from its best to its worst seed.

    Args:
      file: Where to, a PNG.
      compared: Each arm's runs, a run a seed.
      freeze_step: Marked.
      steps: The last step.
    """
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for arm, runs in compared.items():
        at = [int(step) for step in runs[0].eval_losses]
        rows = list(zip(*(run.eval_losses.values() for run in runs), strict=True))
        axes.plot(at, [statistics.mean(row) for row in rows], label=arm)
        axes.fill_between(at, list(map(min, rows)), list(map(max, rows)), alpha=0.2)
    axes.axvline(freeze_step, color="grey", linestyle=":", label="freeze")
    axes.set(xlabel="step", ylabel="held-out loss (nats)", xlim=(0, steps))
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
    plt.close(figure)
