"""The table, the JSON and the page of `benchmarks.bert`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from benchmarks.bert.results import Compiled, PassTiming, ProductRate, Results
from benchmarks.page import fill, table
from train.plan.targets import GPUS

if TYPE_CHECKING:
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
        parts += [_about(peak, rows[0]), "", table(HEADS, map(_cells, rows))]
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


def _cells(row: PassTiming) -> tuple[str, ...]:
    first, median, third = row.milliseconds
    slow, middle, fast = row.speed_up
    return (
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


def _compiled_text(compiled: Compiled) -> str:
    """A table of memory and one of kernels."""
    gpu = GPUS[compiled.platform]
    kinds = list(dict.fromkeys(k for case in compiled.cases for k in case["kernels"]))
    memory = table(COMPILED_HEADS, map(_memory_cells, compiled.cases))
    kernels = table(
        (*COMPILED_HEADS[:4], *kinds),
        [
            (*_variant(case), *(str(case["kernels"].get(kind, 0)) for kind in kinds))
            for case in compiled.cases
        ],
    )
    heading = (
        f"jax {compiled.jax}, for {gpu.label}, which holds {gpu.memory / 1e9:.0f} GB"
    )
    skipped = [f"- {line}" for line in compiled.skipped]
    return "\n".join([heading, "", memory, "", kernels, "", *skipped]).rstrip()


def _memory_cells(case: dict[str, Any]) -> tuple[str, ...]:
    memory = case["memory"]
    kept = ", ".join(f"{n / 1e9:.1f} {k}" for k, n in sorted(case["kept"].items()))
    parts = "arguments", "temporaries", "together"
    return (
        *_variant(case),
        *(f"{memory[part] / 1e9:.1f}" for part in parts),
        kept,
        f"{case['flops'] / 1e12:.1f}",
        f"{case['seconds']:.0f} s",
    )


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
      old: Text of the page before the run.
    """
    if file:
        dump = json.dumps(dataclasses.asdict(results), indent=1, ensure_ascii=False)
        file.write_text(dump + "\n", encoding="utf-8")
    if page and old is not None:
        page.write_text(fill(old, results.platform, text(results)), encoding="utf-8")
