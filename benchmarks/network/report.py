"""The table, the JSON and the picture of `benchmarks.network`."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from benchmarks.network.hosts import bits_per_second
from benchmarks.network.results import BASELINES, Measurement, Results, speed_up
from benchmarks.page import table
from train.core.text_file import replace_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

MARK = "measured"
"""The part of a page that the tables go to."""


def tables(results: Results) -> str:
    """Two tables as Markdown: training steps, and exchanges by themselves.

    Args:
      results: The measurements.

    Returns:
      The lines.
    """
    parts = []
    heads = {"step": ["optimizer", "stage"], "exchange": ["exchange"]}
    for kind, names in heads.items():
        rows = [row for row in results.rows if row.kind == kind]
        if not rows:
            continue
        columns = [
            "hosts",
            "rate",
            *names,
            "seconds (quartiles)",
            f"faster than {BASELINES[kind]}",
            *(["with equal computation"] if kind == "step" else []),
            "computation",
            "wire",
            "of the bound",
            "on the network",
            "MB counted",
            "sent / counted",
            "with headers",
        ]
        lines = [_cells(row, results.rows, len(names)) for row in rows]
        parts.append(table(columns, lines))
    return "\n\n".join(parts)


def _cells(
    row: Measurement, rows: Sequence[Measurement], names: int
) -> tuple[str, ...]:
    # Exchanges by themselves: pmean computes nothing of its own.
    forms = (False, True) if row.kind == "step" else (False,)
    ratios = [speed_up(row, rows, equal_computation=form) for form in forms]
    first, third = row.quartiles
    return (
        str(row.hosts) if row.devices == 1 else f"{row.hosts} of {row.devices} devices",
        row.rate,
        *(row.name, row.stage or "")[:names],
        f"{row.median:.3f} ({first:.3f}, {third:.3f})",
        *("" if ratio is None else f"{ratio:.1f}" for ratio in ratios),
        f"{row.computation_seconds:.3f}",
        f"{row.wire_seconds:.3f}",
        f"{row.attained:.2f}",
        f"{row.network_share:.0%}",
        f"{row.sent_bytes / 1e6:.2f}",
        f"{row.overhead:.3f}",
        f"{row.packet_overhead:.3f}",
    )


def write_json(file: Path, results: Results) -> None:
    """Writes all measurements, and the numbers that follow from them.

    Args:
      file: The JSON.
      results: The measurements.
    """
    stored = dataclasses.asdict(results)
    for written, row in zip(stored["rows"], results.rows, strict=True):
        written |= {
            "median": row.median,
            "quartiles": row.quartiles,
            "wire_seconds": row.wire_seconds,
            "bound_seconds": row.bound_seconds,
            "attained": row.attained,
            "network_share": row.network_share,
            "speed_up": speed_up(row, results.rows),
        }
    text = json.dumps(stored, indent=1, ensure_ascii=False)
    replace_text(file, text + "\n")


def read_results(file: Path) -> Results:
    """Reads the results of an earlier run.

    Args:
      file: The JSON, by `write_json`.

    Returns:
      The results.
    """
    stored = json.loads(file.read_text(encoding="utf-8"))
    names = [each.name for each in dataclasses.fields(Measurement)]
    rows = [
        Measurement(**{name: row[name] for name in names}) for row in stored["rows"]
    ]
    return Results(**(stored | {"rows": rows}))


def check_same(file: Path, earlier: Results, results: Results) -> None:
    """Refuses to add to the results of other settings or of another machine.

    Args:
      file: The JSON of the earlier run.
      earlier: Its results.
      results: Those of this run.

    Raises:
      SystemExit: They differ.
    """
    for name in ("settings", "network", "processor", "jax"):
        old, new = getattr(earlier, name), getattr(results, name)
        if old != new:
            raise SystemExit(
                f"{file} has rows with {name} {old}, not {new}: remove it, or choose "
                "another --json."
            )


def write_picture(file: Path, results: Results) -> None:
    """Draws seconds and their bounds, a panel a host count and kind.

    Args:
      file: The PNG.
      results: The measurements.
    """
    mpl.use("Agg")
    places = sorted({(row.hosts, row.devices) for row in results.rows})
    kinds = [kind for kind in BASELINES if any(r.kind == kind for r in results.rows)]
    rates = sorted({row.rate for row in results.rows}, key=bits_per_second)
    colours = {rate: f"C{i}" for i, rate in enumerate(rates)}
    tallest = max(Counter(row.where[:2] for row in results.rows).values())
    figure, grid = plt.subplots(
        len(kinds),
        len(places),
        figsize=(4.5 * len(places) + 1, 0.25 * tallest + 1.5 * len(kinds) + 1),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    for line, kind in zip(grid, kinds, strict=True):
        for axes, place in zip(line, places, strict=True):
            rows = [r for r in results.rows if (*r.where[:2], r.kind) == (*place, kind)]
            if not rows:
                axes.set_axis_off()
                continue
            _points(axes, rows, colours)
            hosts, devices = place
            each = f" of {devices} devices" if devices > 1 else ""
            axes.set(title=f"{kind}, {hosts} hosts{each}", xscale="log")
    figure.supxlabel("seconds; a stroke is the bound, a number how much faster")
    marks = [
        Line2D([], [], linestyle="", marker="o", color=colour, label=rate)
        for rate, colour in colours.items()
    ]
    figure.legend(handles=marks, loc="outside upper center", ncols=len(rates))
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _points(axes: Axes, rows: Sequence[Measurement], colours: dict[str, str]) -> None:
    for place, row in enumerate(rows):
        first, third = row.quartiles
        colour = colours[row.rate]
        axes.plot([first, third], [place, place], color=colour)
        axes.plot(row.median, place, marker="o", color=colour)
        stroke = {"marker": "|", "markersize": 12, "color": "black"}
        axes.plot(row.bound_seconds, place, **stroke)
        ratio = speed_up(row, rows)
        if ratio is not None and row.name != BASELINES[row.kind]:
            text = f"{ratio:.1f} \N{MULTIPLICATION SIGN}"
            where = {"xytext": (8, 0), "textcoords": "offset points"}
            axes.annotate(text, (row.median, place), va="center", fontsize=8, **where)
    names = [f"{row.name} {row.stage or ''}".strip() for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
