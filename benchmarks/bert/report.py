"""The table, the JSON and the page of `benchmarks.bert`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from benchmarks.bert.rows import Results
from benchmarks.page import fill

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.bert.compile import Compiled
    from benchmarks.bert.rows import Peak, Row

HEADS = (
    "pass",
    "implementation",
    "attention",
    "remat",
    "projected",
    "ms (quartiles)",
    "examples/s",
    "TFLOP/s",
    "of the peak",
    "faster (quartiles)",
    "GB held",
)


def text(results: Results | Compiled) -> str:
    """What was measured, or compiled, as Markdown.

    Args:
      results: Of either.

    Returns:
      The lines.
    """
    if not isinstance(results, Results):
        from benchmarks.bert.compile import table

        return table(results)
    parts = [_heading(results)]
    for peak in results.peaks:
        rows = [
            row
            for row in results.rows
            if (row.model, row.length) == (peak.model, peak.length)
        ]
        parts += [_about(peak, rows[0]), _table(rows)]
    parts += ["", *(f"- {line}" for line in results.skipped)]
    return "\n".join(parts).rstrip()


def _heading(results: Results) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in results.versions.items())
    settings = results.settings
    layers = "a loop" if settings["scan"] else "unrolled"
    return (
        f"{results.device_kind} ({results.platform}), {results.processor}, "
        f"{results.cores} cores, load before the run {results.load:.1f}; {versions}; "
        f"{settings['optimizer']}, layers {layers}; medians of {settings['repeats']}"
    )


def _about(peak: Peak, row: Row) -> str:
    first, median, third = peak.tflops_per_second
    return (
        f"\n**{peak.model}, {row.batch} x {peak.length} tokens, {peak.dtype}.** "
        f"Matrix product of {peak.size:,}²: {median:.3g} TFLOP/s "
        f"({first:.3g}, {third:.3g}). *Faster* than {peak.baseline}."
    )


def _table(rows: Sequence[Row]) -> str:
    lines = ["", f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    return "\n".join([*lines, *map(_line, rows)])


def _line(row: Row) -> str:
    first, median, third = row.milliseconds
    slow, middle, fast = row.speed_up
    cells = (
        row.name,
        row.implementation,
        row.attention,
        row.remat,
        f"{row.predictions} of {row.length}",
        f"{median:.4g} ({first:.4g}, {third:.4g})",
        f"{row.examples_per_second:.4g}",
        f"{row.tflops_per_second:.3g}",
        f"{row.of_peak:.0%}",
        f"{middle:.2f} ({slow:.2f}, {fast:.2f})",
        "" if row.held_bytes is None else f"{row.held_bytes / 1e9:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def write(
    results: Results | Compiled, file: Path | None, page: Path | None, old: str | None
) -> None:
    """Writes the files that are asked for.

    Args:
      results: What was measured or compiled so far.
      file: Where all of it goes, a JSON.
      page: Where the tables go, between the marks of its platform.
      old: The page before.
    """
    if file:
        dump = json.dumps(dataclasses.asdict(results), indent=1, ensure_ascii=False)
        file.write_text(dump + "\n", encoding="utf-8")
    if page and old is not None:
        page.write_text(fill(old, results.platform, text(results)), encoding="utf-8")
