"""A picture of a run: loss, other means of evaluations, bytes that a worker sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

FILE = "training.png"
_COLORS = ("tab:blue", "tab:orange")
_SMOOTHING = 0.8


def draw(path: Path, runs: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Draws runs beside each other.

    Args:
      path: Where to write the PNG.
      runs: The lines of `metrics.jsonl` by the name of the optimizer.
    """
    measures = _measures(runs)
    columns = 2 + len(measures)
    figure = Figure(figsize=(5.5 * columns, 4.5), layout="constrained")
    losses, *others, traffic = figure.subplots(1, columns)
    for color, (name, lines) in zip(_COLORS, runs.items(), strict=False):
        steps = [line for line in lines if "stage" in line]
        evaluations = [line for line in lines if "eval_loss" in line]
        _draw_losses(losses, name, color, steps, evaluations)
        for axes, measure in zip(others, measures, strict=True):
            _draw_held_out(axes, measure, name, color, evaluations)
        megabytes = [line["total_sent_bytes"] / 1e6 for line in steps]
        traffic.plot(_column(steps, "step"), megabytes, color=color, label=name)
        begins = {line["stage"]: line["step"] for line in reversed(steps)}
        for stage, step in sorted(begins.items(), key=lambda item: item[1])[1:]:
            for axes in (losses, *others, traffic):
                axes.axvline(step, color=color, linestyle=":", label=stage)
    losses.set(xlabel="step", ylabel="loss (nats)", title="Loss")
    for axes, measure in zip(others, measures, strict=True):
        title = measure.removeprefix("eval_").replace("_", " ").capitalize()
        axes.set(xlabel="step", title=title)
    traffic.set(
        xlabel="step",
        ylabel="megabytes",
        ylim=(0, None),
        title="Sent by one worker, cumulated",
    )
    for axes in (losses, *others, traffic):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def _measures(runs: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """The names of what evaluations measured beside the loss."""
    names = {name for lines in runs.values() for line in lines for name in line}
    return sorted(n for n in names - {"eval_loss"} if n.startswith("eval_"))


def _draw_losses(
    axes: Axes,
    name: str,
    color: str,
    steps: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]],
) -> None:
    finite = [line for line in steps if line["loss"] is not None]
    raw = _column(finite, "loss")
    axes.plot(_column(finite, "step"), raw, color=color, alpha=0.2)
    label = f"{name}, training (smoothed)"
    axes.plot(_column(finite, "step"), _smooth(raw), color=color, label=label)
    _draw_held_out(axes, "eval_loss", name, color, evaluations)


def _draw_held_out(
    axes: Axes,
    measure: str,
    name: str,
    color: str,
    evaluations: Sequence[dict[str, Any]],
) -> None:
    axes.plot(
        _column(evaluations, "step"),
        _column(evaluations, measure),
        color=color,
        linestyle="",
        marker="o",
        label=f"{name}, held-out",
    )


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
