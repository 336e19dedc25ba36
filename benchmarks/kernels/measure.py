"""Times each operation beside its baseline."""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import pallas_kernels
from benchmarks.kernels import numpy_and_torch
from benchmarks.kernels.inputs import ADAM, bytes_moved, make_inputs
from benchmarks.kernels.operations import Operation, copy, operations
from benchmarks.machine import processor
from benchmarks.timing import seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchmarks.kernels.operations import Call

SIZES = {
    "cpu": (1_000_000, 11_000_000, 110_000_000),
    "gpu": (1_000_000, 11_000_000, 110_000_000, 335_000_000, 400_000_000),
}
# A step's buffers, Adam's and their results, not all at once: sixteen of float32.
BYTES_A_VALUE = 64
HOPPER = 9


@dataclass(frozen=True)
class Timing:
    """One operation on one size.

    Attributes:
      operation: Its name.
      buffers: 'fresh' or 'donated'.
      size: Values of the buffer.
      implementation: Name of its implementation.
      milliseconds: Median time of a call.
      bytes: Bytes that it must read and write.
      gb_per_s: GB/s, these bytes over that time.
      of_copy: Share of the copy's bytes a second.
      baseline: Name of its baseline: elementwise, or Adam's update.
      baseline_milliseconds: Median time of the baseline.
      ratio: Median ratio to the baseline's time.
    """

    operation: str
    buffers: str
    size: int
    implementation: str
    milliseconds: float
    bytes: int
    gb_per_s: float
    of_copy: float
    baseline: str | None
    baseline_milliseconds: float | None
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
      repeats: Timed pairs of calls.
      calls: Calls timed together.
      copies: A dictionary each of size, buffers and the copy's GB/s.
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
    copies: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Timing] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def measure(
    sizes: Sequence[int],
    implementations: Sequence[str],
    block_size: int,
    repeats: int,
    calls: int,
    wanted: Callable[[Operation], bool] = lambda operation: True,
    *,
    baselines: bool = True,
) -> Iterator[Results]:
    """Measures operations.

    Args:
      sizes: Values of a buffer; none for the default ones.
      implementations: Names; none for those that run here.
      block_size: Values a scale.
      repeats: Timed pairs of calls.
      calls: Calls timed together.
      wanted: Whether an operation is measured.
      baselines: Whether their baselines are measured in turn with them.

    Yields:
      The results, after each operation with that one's, and after each size that
      is left out.
    """
    device = jax.devices()[0]
    sizes = sizes or SIZES.get(device.platform, SIZES["gpu"])
    for name in implementations:
        pallas_kernels.check_name(name)
    implementations = implementations or _implementations(device)
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
    why = numpy_and_torch.why_no_torch()
    if why:
        _skip(results, why)
    for size in sizes:
        needed, free = BYTES_A_VALUE * size, _free_bytes(device)
        if needed > free / 2:
            _skip(
                results,
                f"size {size:,}: {needed / 1e9:.1f} GB of arrays are more than half of "
                f"the {free / 1e9:.1f} GB that are free",
            )
            yield results
            continue
        chosen = (
            each if baselines else each._replace(baseline=None)
            for each in _operations(results, size, implementations, not why)
            if wanted(each)
        )
        yield from _measure_size(results, size, chosen)


def _measure_size(
    results: Results, size: int, chosen: Iterable[Operation]
) -> Iterator[Results]:
    x = jax.random.normal(jax.random.key(0), (size,))
    copied = {}
    for buffers in ("fresh", "donated"):
        run = copy(x, donated=buffers == "donated")
        times, _ = _times(results, run, None, jax.block_until_ready)
        copied[buffers] = 8 * size / statistics.median(times) / 1e9
        results.copies.append(
            {"size": size, "buffers": buffers, "gb_per_s": copied[buffers]}
        )
        del run
    del x
    moved = bytes_moved(size, results.block_size)
    for each in chosen:
        rate = copied[each.buffers]
        try:
            row = _timing(results, each, size, moved[each.name], rate)
        # One that does not compile, or does not fit, is told beside the others.
        except Exception as error:
            what = f"{each.name}, {each.buffers}, {size:,}, {each.implementation}"
            said = str(error).strip() or repr(error)
            _skip(results, f"{what}: not measured: {said.splitlines()[0]}")
        else:
            results.rows.append(row)
        yield results


def _operations(
    results: Results, size: int, implementations: Sequence[str], compare_torch: bool
) -> Iterator[Operation]:
    inputs = jax.block_until_ready(make_inputs(size, results.block_size))
    ours = list(operations(inputs, results.block_size, implementations))
    yield from ours
    if results.platform == "cpu":
        yield from numpy_and_torch.numpy_operations(size)
    if compare_torch:
        yield from numpy_and_torch.torch_operations(ours, size)


def _timing(
    results: Results, operation: Operation, size: int, moved: int, copied: float
) -> Timing:
    baseline = None if operation.baseline is None else operation.baseline()
    times, beside = _times(results, operation.prepare(), baseline, operation.wait)
    median = statistics.median(times)
    rate = moved / median / 1e9
    name = ADAM if operation.name.startswith("step") else "elementwise"
    ratios = [a / b for a, b in zip(times, beside, strict=True)] if beside else []
    return Timing(
        operation=operation.name,
        buffers=operation.buffers,
        size=size,
        implementation=operation.implementation,
        milliseconds=1e3 * median,
        bytes=moved,
        gb_per_s=rate,
        of_copy=rate / copied,
        baseline=name if beside else None,
        baseline_milliseconds=1e3 * statistics.median(beside) if beside else None,
        ratio=statistics.median(ratios) if ratios else None,
    )


def _times(
    results: Results,
    run: Call,
    baseline: Call | None,
    wait: Callable[[Any], Any],
) -> tuple[list[float], list[float]]:
    """Seconds a call, and of the baseline's calls in between."""
    times, beside = [], []
    # One more than is kept: the first calls compile.
    for _ in range(results.repeats + 1):
        times.append(seconds(run, wait, results.calls))
        if baseline is not None:
            beside.append(seconds(baseline, jax.block_until_ready, results.calls))
    return times[1:], beside[1:]


def _skip(results: Results, line: str) -> None:
    print(line, file=sys.stderr)
    results.skipped.append(line)


def _implementations(device: Any) -> tuple[str, ...]:
    capability = getattr(device, "compute_capability", "0")
    hopper = device.platform == "gpu" and float(capability) >= HOPPER
    return ("xla", "mosaic") if hopper else ("xla",)


def _free_bytes(device: Any) -> int:
    if device.platform != "cpu":
        stats = device.memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"]
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(available.split()[1])
