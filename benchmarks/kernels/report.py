"""The table, the JSON and the picture of `benchmarks.kernels`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib import ticker

from benchmarks.page import table

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from benchmarks.kernels.measure import Results, Timing

HEADS = (
    "operation",
    "buffers",
    "size",
    "implementation",
    "ms",
    "MB moved",
    "GB/s",
    "of the copy",
    "ratio",
    "to",
)


def text(results: Results) -> str:
    """The measurements as Markdown, under the machine that they were taken on.

    Args:
      results: The measurements.

    Returns:
      The lines.
    """
    cores = "one core" if results.threads == 1 else f"{results.threads} cores"
    where = f"{results.device_kind} ({results.platform}), {results.processor}, {cores}"
    lines = [
        f"{where}; JAX {results.jax}; {results.block_size} values a scale; medians of "
        f"{results.repeats}, {results.calls} calls timed together",
        "",
        table(
            ("a copy's buffers", "size", "GB/s"),
            [
                (copy["buffers"], f"{copy['size']:,}", f"{copy['gb_per_s']:.1f}")
                for copy in results.copies
            ],
        ),
        "",
        table(HEADS, map(_cells, results.rows)),
        "",
        *(f"- {line}" for line in results.skipped),
    ]
    return "\n".join(lines).rstrip()


def _cells(row: Timing) -> tuple[str, ...]:
    return (
        row.operation,
        row.buffers,
        f"{row.size:,}",
        row.implementation,
        f"{row.milliseconds:.3g}",
        f"{row.bytes / 1e6:.3g}",
        f"{row.gb_per_s:.1f}",
        f"{row.of_copy:.0%}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.baseline or "",
    )


def write_json(file: Path, results: Results) -> None:
    """Writes everything that was measured.

    Args:
      file: The JSON.
      results: The measurements.
    """
    text = json.dumps(dataclasses.asdict(results), indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def write_picture(file: Path, results: Results) -> None:
    """Draws bytes a second against size, an operation a panel, under the copy's.

    Args:
      file: The PNG.
      results: The measurements.
    """
    mpl.use("Agg")
    operations = list(dict.fromkeys(row.operation for row in results.rows))
    columns = 5
    lines = -(-len(operations) // columns)
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(14, 3 * lines + 1),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    labelled = {}
    for axes, operation in zip(grid.flat, operations, strict=False):
        labelled |= _draw(axes, results, operation)
        axes.set(title=operation, xscale="log", yscale="log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(operations) :]:
        axes.set_axis_off()
    figure.supxlabel("values of the buffer")
    figure.supylabel("bytes that must move, GB/s")
    figure.legend(
        labelled.values(), labelled.keys(), loc="outside upper center", ncols=4
    )
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _draw(axes: Axes, results: Results, operation: str) -> dict[str, Line2D]:
    """Draws the lines of an operation and of the copy, and gives them by label."""
    names = dict.fromkeys(row.implementation for row in results.rows)
    drawn = {}
    for buffers, style in (("fresh", ":"), ("donated", "-")):
        roof = [copy for copy in results.copies if copy["buffers"] == buffers]
        drawn[f"copy, {buffers}"] = axes.plot(
            [copy["size"] for copy in roof],
            [copy["gb_per_s"] for copy in roof],
            color="black",
            linestyle=style,
            marker="_",
        )[0]
        for i, name in enumerate(names):
            rows = [
                row
                for row in results.rows
                if (row.operation, row.buffers, row.implementation)
                == (operation, buffers, name)
            ]
            if rows:
                drawn[f"{name}, {buffers}"] = axes.plot(
                    [row.size for row in rows],
                    [row.gb_per_s for row in rows],
                    color=f"C{i}",
                    linestyle=style,
                    marker="o",
                )[0]
    return drawn
