"""A picture of a run: loss, other means of evaluations, bytes that a worker sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FILE = "training.png"
_COLORS = ("tab:blue", "tab:orange", "tab:green")
_SMOOTHING = 0.8


def draw(path: Path, runs: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Draws runs beside each other.

    Args:
      path: Where to write the PNG.
      runs: The lines of `metrics.jsonl` by the name of the optimizer.
    """
    names = {name for lines in runs.values() for line in lines for name in line}
    means = sorted(n for n in names - {"eval_loss"} if n.startswith("eval_"))
    figure = Figure(figsize=(5.5 * (2 + len(means)), 4.5), layout="constrained")
    losses, *others, traffic = figure.subplots(1, 2 + len(means))
    for color, (name, lines) in zip(_COLORS, runs.items(), strict=False):
        steps = [line for line in lines if "stage" in line]
        finite = [line for line in steps if line["loss"] is not None]
        at, loss = _column(finite, "step"), _column(finite, "loss")
        losses.plot(at, loss, color=color, alpha=0.2)
        label = f"{name}, training (smoothed)"
        losses.plot(at, _smooth(loss), color=color, label=label)
        evaluations = [line for line in lines if "eval_loss" in line]
        at = _column(evaluations, "step")
        for axes, mean in zip((losses, *others), ("eval_loss", *means), strict=True):
            held_out = _column(evaluations, mean)
            axes.plot(at, held_out, "o", color=color, label=f"{name}, held-out")
        megabytes = [line["total_sent_bytes"] / 1e6 for line in steps]
        traffic.plot(_column(steps, "step"), megabytes, color=color, label=name)
        begins = {line["stage"]: line["step"] for line in reversed(steps)}
        for stage, step in sorted(begins.items(), key=lambda item: item[1])[1:]:
            for axes in (losses, *others, traffic):
                axes.axvline(step, color=color, linestyle=":", label=stage)
    losses.set(ylabel="loss (nats)", title="Loss")
    for axes, mean in zip(others, means, strict=True):
        axes.set(title=mean.removeprefix("eval_").replace("_", " ").capitalize())
    title = "Sent by one worker, cumulated"
    traffic.set(ylabel="megabytes", ylim=(0, None), title=title)
    for axes in (losses, *others, traffic):
        axes.set(xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def _column(lines: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines]


def _smooth(values: Sequence[float]) -> list[float]:
    """An exponential moving average, corrected for its start."""
    average, weight, smoothed = 0.0, 0.0, []
    for value in values:
        average = _SMOOTHING * average + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        smoothed.append(average / weight)
    return smoothed
