"""The table, the JSON and the page of `benchmarks.bert`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from benchmarks.bert.results import Compiled, PassTiming, ProductRate, Results
from benchmarks.page import fill
from train.plan.targets import GPUS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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

COMPILED_HEADS = (
    "model",
    "sequences",
    "attention",
    "remat",
    "GB of arguments",
    "GB of temporaries",
    "GB together",
    "GB kept by the layers",
    "TFLOP",
    "compiled in",
)


def text(results: Results | Compiled) -> str:
    """Results as Markdown.

    Args:
      results: The measurements, or the compiled steps.

    Returns:
      The lines.
    """
    if isinstance(results, Compiled):
        return _compiled_text(results)
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


def _about(peak: ProductRate, row: PassTiming) -> str:
    first, median, third = peak.tflops_per_second
    return (
        f"\n**{peak.model}, {row.batch} x {peak.length} tokens, {peak.dtype}.** "
        f"Matrix product of {peak.size:,}²: {median:.3g} TFLOP/s "
        f"({first:.3g}, {third:.3g}). *Faster* than {peak.baseline}."
    )


def _table(rows: Sequence[PassTiming]) -> str:
    lines = ["", f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    return "\n".join([*lines, *map(_line, rows)])


def _line(row: PassTiming) -> str:
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


def _compiled_text(compiled: Compiled) -> str:
    """A table of memory and one of kernels."""
    lines = [
        f"jax {compiled.jax}, for {GPUS[compiled.platform].label}, which holds "
        f"{GPUS[compiled.platform].memory / 1e9:.0f} GB",
        "",
        f"| {' | '.join(COMPILED_HEADS)} |",
        "|---" * len(COMPILED_HEADS) + "|",
    ]
    kinds: list[str] = []
    for case in compiled.cases:
        kinds += [kind for kind in case["kernels"] if kind not in kinds]
        memory = case["memory"]
        kept = ", ".join(f"{n / 1e9:.1f} {k}" for k, n in sorted(case["kept"].items()))
        cells = (
            *_variant(case),
            *(
                f"{memory[name] / 1e9:.1f}"
                for name in ("arguments", "temporaries", "together")
            ),
            kept,
            f"{case['flops'] / 1e12:.1f}",
            f"{case['seconds']:.0f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    heads = (*COMPILED_HEADS[:4], *kinds)
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in compiled.cases:
        cells = (
            *_variant(case),
            *(str(case["kernels"].get(kind, 0)) for kind in kinds),
        )
        lines.append(f"| {' | '.join(cells)} |")
    skipped = [f"- {line}" for line in compiled.skipped]
    return "\n".join([*lines, "", *skipped]).rstrip()


def _variant(case: dict[str, Any]) -> tuple[str, ...]:
    sequences = f"{case['batch']} x {case['length']}"
    return case["model"], sequences, case["attention"], case["remat"]


def write(
    results: Results | Compiled, file: Path | None, page: Path | None, old: str | None
) -> None:
    """Writes the files that are asked for.

    Args:
      results: The results so far.
      file: The JSON for all of it.
      page: The page for the tables, which go between the marks of their platform.
      old: The page before.
    """
    if file:
        dump = json.dumps(dataclasses.asdict(results), indent=1, ensure_ascii=False)
        file.write_text(dump + "\n", encoding="utf-8")
    if page and old is not None:
        page.write_text(fill(old, results.platform, text(results)), encoding="utf-8")
