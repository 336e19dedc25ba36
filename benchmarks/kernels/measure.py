"""Times each operation beside a copy, and whole steps beside Adam's."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

import pallas_kernels
from benchmarks.kernels.inputs import bytes_moved, make_inputs
from benchmarks.kernels.operations import copy, operations
from benchmarks.machine import processor
from benchmarks.page import table
from benchmarks.timing import seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.kernels.operations import Call, Operation

SIZES = {"cpu": (1_048_576, 11_010_048), "gpu": (110_100_480, 335_544_320)}
HOPPER = 9


@dataclass(frozen=True)
class Timing:
    """One operation on one size.

    Attributes:
      operation: Its name.
      size: Values of the buffer.
      implementation: Name of its implementation.
      milliseconds: Median time of a call.
      bytes: Bytes that it must read and write.
      gb_per_s: GB/s, these bytes over that time.
      of_copy: Share of the copy's bytes a second.
      ratio: Of a whole step the median ratio to Adam's.
    """

    operation: str
    size: int
    implementation: str
    milliseconds: float
    bytes: int
    gb_per_s: float
    of_copy: float
    ratio: float | None


@dataclass
class Results:
    """All that was measured, and on which machine.

    Attributes:
      platform: JAX's name of the platform.
      device_kind: JAX's name of the device.
      processor: Name of the CPU.
      jax: Version of JAX.
      threads: Cores that the program may use.
      block_size: Values a scale.
      repeats: Timed calls.
      calls: Calls timed together.
      copies: From size, as text, to the copy's GB/s.
      rows: The measurements.
      skipped: Sentences on what was not measured, and why.
    """

    platform: str
    device_kind: str
    processor: str
    jax: str
    threads: int
    block_size: int
    repeats: int
    calls: int
    copies: dict[str, float] = field(default_factory=dict)
    rows: list[Timing] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def measure(
    sizes: Sequence[int],
    implementations: Sequence[str],
    block_size: int,
    repeats: int,
    calls: int,
    names: Sequence[str] = (),
) -> Iterator[Results]:
    """Measures operations, an implementation's after all of the one before it.

    A kernel that hangs or breaks the device ends what is measured after it.

    Args:
      sizes: Values of a buffer; none for the default ones.
      implementations: Names; none for those that run here.
      block_size: Values a scale.
      repeats: Timed calls.
      calls: Calls timed together.
      names: Operations; none for all.

    Yields:
      The results, after each operation with that one's.
    """
    device = jax.devices()[0]
    for name in implementations:
        pallas_kernels.check_name(name)
    results = Results(
        platform=device.platform,
        device_kind=device.device_kind,
        processor=processor(),
        jax=jax.__version__,
        threads=len(os.sched_getaffinity(0)),
        block_size=block_size,
        repeats=repeats,
        calls=calls,
    )
    for implementation in ("optax", *(implementations or _implementations(device))):
        for size in sizes or SIZES.get(device.platform, SIZES["gpu"]):
            inputs = jax.block_until_ready(make_inputs(size, block_size))
            if str(size) not in results.copies:
                times, _ = _times(results, copy(inputs.value), None)
                results.copies[str(size)] = 8 * size / statistics.median(times) / 1e9
            for each in operations(inputs, block_size, implementation):
                if not names or each.name in names:
                    _measure(results, each, size)
                    yield results


def _measure(results: Results, operation: Operation, size: int) -> None:
    try:
        row = _timing(results, operation, size)
    # One that does not compile, or does not fit, is told beside the others.
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        what = f"{operation.name}, {size:,}, {operation.implementation}"
        results.skipped.append(f"{what}: not measured: {said}")
        print(results.skipped[-1], file=sys.stderr)
    else:
        results.rows.append(row)


def _timing(results: Results, operation: Operation, size: int) -> Timing:
    baseline = None if operation.baseline is None else operation.baseline()
    times, beside = _times(results, operation.prepare(), baseline)
    median = statistics.median(times)
    moved = bytes_moved(size, results.block_size)[operation.name]
    rate = moved / median / 1e9
    ratios = [a / b for a, b in zip(times, beside, strict=bool(beside))]
    return Timing(
        operation=operation.name,
        size=size,
        implementation=operation.implementation,
        milliseconds=1e3 * median,
        bytes=moved,
        gb_per_s=rate,
        of_copy=rate / results.copies[str(size)],
        ratio=statistics.median(ratios) if ratios else None,
    )


def _times(
    results: Results, run: Call, baseline: Call | None
) -> tuple[list[float], list[float]]:
    """Seconds a call, and of the baseline's calls in between."""
    times, beside = [], []
    # One more than is kept: the first calls compile.
    for _ in range(results.repeats + 1):
        times.append(seconds(run, jax.block_until_ready, results.calls))
        if baseline is not None:
            beside.append(seconds(baseline, jax.block_until_ready, results.calls))
    return times[1:], beside[1:]


def _implementations(device: Any) -> tuple[str, ...]:
    capability = getattr(device, "compute_capability", "0")
    hopper = device.platform == "gpu" and float(capability) >= HOPPER
    return ("xla", "mosaic") if hopper else ("xla",)


def text(results: Results) -> str:
    """The measurements as Markdown, under the machine that they were taken on."""
    cores = "one core" if results.threads == 1 else f"{results.threads} cores"
    where = f"{results.device_kind} ({results.platform}), {results.processor}, {cores}"
    copies = ((f"{int(n):,}", f"{rate:.1f}") for n, rate in results.copies.items())
    heads = ("operation", "size", "implementation", "ms", "MB moved", "GB/s")
    lines = [
        f"{where}; JAX {results.jax}; {results.block_size} values a scale; medians of "
        f"{results.repeats}, {results.calls} calls timed together",
        "",
        table(("values copied", "GB/s"), copies),
        "",
        table((*heads, "of the copy", "times Adam's step"), map(_cells, results.rows)),
        "",
        *(f"- {line}" for line in results.skipped),
    ]
    return "\n".join(lines).rstrip()


def _cells(row: Timing) -> tuple[str, ...]:
    return (
        row.operation,
        f"{row.size:,}",
        row.implementation,
        f"{row.milliseconds:.3g}",
        f"{row.bytes / 1e6:.3g}",
        f"{row.gb_per_s:.1f}",
        f"{row.of_copy:.0%}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
    )


def write_json(file: Path, results: Results) -> None:
    """Writes everything that was measured."""
    dump = json.dumps(dataclasses.asdict(results), indent=1, ensure_ascii=False)
    file.write_text(dump + "\n", encoding="utf-8")


def read_json(values: dict[str, Any]) -> Results:
    """The results that `write_json` wrote, from the values of its file."""
    rows: list[Any] = [Timing(**row) for row in values["rows"]]
    return Results(**{**values, "rows": rows})
