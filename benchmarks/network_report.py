"""The table, the JSON and the picture of `benchmarks.network`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.network_rows import BASELINES, Results, Row, speed_up

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

MARKS = "<!-- measured -->", "<!-- end -->"


def tables(results: Results) -> str:
    """Two tables as Markdown: training steps, and exchanges by themselves.

    Args:
      results: Of the measurement.

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
            "computation",
            "wire",
            "of the bound",
            "on the network",
            "MB counted",
            "sent / counted",
            "with headers",
        ]
        lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [_line(row, results.rows, len(names)) for row in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(row: Row, rows: Sequence[Row], names: int) -> str:
    ratio = speed_up(row, rows)
    first, third = row.quartiles
    cells = (
        str(row.hosts) if row.devices == 1 else f"{row.hosts} of {row.devices} devices",
        row.rate,
        *(row.name, row.stage or "")[:names],
        f"{row.median:.3f} ({first:.3f}, {third:.3f})",
        "" if ratio is None else f"{ratio:.1f}",
        f"{row.computation_seconds:.3f}",
        f"{row.wire_seconds:.3f}",
        f"{row.attained:.2f}",
        f"{row.network_share:.0%}",
        f"{row.sent_bytes / 1e6:.2f}",
        f"{row.overhead:.3f}",
        f"{row.packet_overhead:.3f}",
    )
    return f"| {' | '.join(cells)} |"


def write_json(file: Path, results: Results) -> None:
    """Writes everything that was measured, and what follows from it.

    Args:
      file: Where to.
      results: Of the measurement.
    """
    stored = dataclasses.asdict(results)
    for held, row in zip(stored["rows"], results.rows, strict=True):
        held |= {
            "median": row.median,
            "quartiles": row.quartiles,
            "wire_seconds": row.wire_seconds,
            "bound_seconds": row.bound_seconds,
            "attained": row.attained,
            "network_share": row.network_share,
            "speed_up": speed_up(row, results.rows),
        }
    text = json.dumps(stored, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def read_rows(file: Path, results: Results) -> list[Row]:
    """Reads the rows of an earlier run.

    Args:
      file: Where `write_json` wrote them.
      results: Of this run, with the same settings on the same machine.

    Returns:
      The rows.

    Raises:
      SystemExit: If they are of other settings or another machine.
    """
    stored = json.loads(file.read_text(encoding="utf-8"))
    for name in ("settings", "network", "processor", "jax"):
        if stored[name] != getattr(results, name):
            raise SystemExit(
                f"{file} has rows with {name} {stored[name]}, not "
                f"{getattr(results, name)}: remove it, or choose another --json."
            )
    names = [each.name for each in dataclasses.fields(Row)]
    return [Row(**{name: row[name] for name in names}) for row in stored["rows"]]


def fill(page: str, text: str) -> str:
    """Puts text between a page's two marks.

    Args:
      page: What has the marks `MARKS`, each once, on lines of their own.
      text: What goes there.

    Returns:
      The new page.

    Raises:
      SystemExit: If it has no such marks.
    """
    before, mark, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not mark or not end:
        raise SystemExit(f"The page must have the lines {' and '.join(MARKS)}.")
    return f"{before}{mark}\n\n{text}\n\n{end}{after}"


def write_picture(file: Path, results: Results) -> None:
    """Draws how much faster than its baseline everything is, a panel a host count.

    Args:
      file: Where to, a PNG.
      results: Of the measurement.
    """
    mpl.use("Agg")
    hosts = sorted({(row.hosts, row.devices) for row in results.rows})
    kinds = [kind for kind in BASELINES if any(r.kind == kind for r in results.rows)]
    figure, grid = plt.subplots(
        len(kinds),
        len(hosts),
        figsize=(4.5 * len(hosts) + 1, 3.5 * len(kinds) + 0.5),
        squeeze=False,
        layout="constrained",
    )
    for line, kind in zip(grid, kinds, strict=True):
        for axes, where in zip(line, hosts, strict=True):
            rows = [
                row
                for row in results.rows
                if (row.kind, (row.hosts, row.devices)) == (kind, where)
            ]
            _bars(axes, rows)
            title = f"{kind}, {where[0]} hosts of {where[1]} devices"
            axes.set(title=title, xscale="log", xlabel="seconds")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    labels = [f"{row.name} {row.stage or ''}\n{row.rate}" for row in rows]
    places = range(len(rows))
    axes.barh(places, [row.median for row in rows], color="C0", label="measured")
    axes.plot(
        [row.bound_seconds for row in rows],
        places,
        linestyle="",
        marker="|",
        markersize=14,
        color="black",
        label="bound",
    )
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    for place, row in zip(places, rows, strict=True):
        ratio = speed_up(row, rows)
        if ratio is not None:
            axes.annotate(f" {ratio:.1f} to 1", (row.median, place), va="center")
    axes.legend(fontsize=7)
