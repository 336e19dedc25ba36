"""Times each case of `benchmarks.kernels` beside its baseline."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from tqdm import tqdm

import pallas_kernels
from benchmarks.kernels import peers as kernels_peers
from benchmarks.kernels.cases import ADAM, Case, bytes_moved, cases, copy, make_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.kernels.cases import Call

SIZES = {
    "cpu": (1_000_000, 11_000_000, 110_000_000),
    "gpu": (1_000_000, 11_000_000, 110_000_000, 335_000_000, 400_000_000),
}
# A step's buffers, Adam's and their results, not all at once: sixteen of float32.
BYTES_A_VALUE = 64
HOPPER = 9


@dataclass(frozen=True)
class Row:
    """One operation on one size.

    Attributes:
      operation: what is done.
      buffers: 'fresh' or 'donated'.
      size: values of the buffer.
      implementation: what does it.
      milliseconds: median time of a call.
      bytes: that it must read and write.
      gb_per_s: these bytes over that time.
      of_copy: share of the copy's bytes a second.
      baseline: what it is measured beside: an elementwise operation, or Adam's update.
      baseline_milliseconds: median time of the baseline.
      ratio: median ratio to the baseline's time.
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
    """What was measured, and where.

    Attributes:
      platform: JAX's.
      device_kind: JAX's.
      processor: name of the CPU.
      jax: version.
      threads: cores that the program may use.
      block_size: values a scale.
      repeats: timed pairs of calls.
      calls: calls timed together.
      copies: from size and buffers to the copy's GB/s.
      rows: the measurements.
      skipped: what was not measured, and why.
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
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def measure(
    sizes: Sequence[int],
    implementations: Sequence[str],
    block_size: int,
    repeats: int,
    calls: int,
) -> Results:
    """Measures every operation.

    Args:
      sizes: values of a buffer; none for the default ones.
      implementations: names; none for those that run here.
      block_size: values a scale.
      repeats: timed pairs of calls.
      calls: calls timed together.

    Returns:
      The results.
    """
    device = jax.devices()[0]
    sizes = sizes or SIZES.get(device.platform, SIZES["gpu"])
    for name in implementations:
        pallas_kernels.check_name(name)
    implementations = implementations or _implementations(device)
    results = Results(
        platform=device.platform,
        device_kind=device.device_kind,
        processor=_processor(),
        jax=jax.__version__,
        threads=len(os.sched_getaffinity(0)),
        block_size=block_size,
        repeats=repeats,
        calls=calls,
    )
    why = kernels_peers.why_no_torch()
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
            continue
        _measure_size(results, size, implementations, compare_torch=not why)
    return results


def _measure_size(
    results: Results, size: int, implementations: Sequence[str], compare_torch: bool
) -> None:
    inputs = jax.block_until_ready(make_inputs(size, results.block_size))
    ours = list(cases(inputs, results.block_size, implementations))
    peers = list(kernels_peers.numpy_cases(size)) if results.platform == "cpu" else []
    if compare_torch:
        peers += kernels_peers.torch_cases(ours, size)
    copied = {}
    for buffers in ("fresh", "donated"):
        run = copy(inputs.value, donated=buffers == "donated")
        times, _ = _times(results, run, None, jax.block_until_ready)
        copied[buffers] = 8 * size / statistics.median(times) / 1e9
        results.copies.append(
            {"size": size, "buffers": buffers, "gb_per_s": copied[buffers]}
        )
    moved = bytes_moved(size, results.block_size)
    for case in tqdm([*ours, *peers], desc=f"{size:,}", disable=None):
        row = _row(results, case, size, moved[case.operation], copied[case.buffers])
        results.rows.append(row)


def _row(results: Results, case: Case, size: int, moved: int, copied: float) -> Row:
    baseline = None if case.baseline is None else case.baseline()
    times, beside = _times(results, case.prepare(), baseline, case.wait)
    seconds = statistics.median(times)
    rate = moved / seconds / 1e9
    name = ADAM if case.operation.startswith("step") else "elementwise"
    ratios = [a / b for a, b in zip(times, beside, strict=True)] if beside else []
    return Row(
        operation=case.operation,
        buffers=case.buffers,
        size=size,
        implementation=case.implementation,
        milliseconds=1e3 * seconds,
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
        times.append(_seconds(run, wait, results.calls))
        if baseline is not None:
            beside.append(_seconds(baseline, jax.block_until_ready, results.calls))
    return times[1:], beside[1:]


def _seconds(run: Call, wait: Callable[[Any], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls - 1):
        run()
    # Its buffers are given back when the clock has stopped.
    last = wait(run())
    seconds = time.perf_counter() - start
    del last
    return seconds / calls


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
    return 1024 * int(_field("/proc/meminfo", "MemAvailable").split()[0])


def _processor() -> str:
    return _field("/proc/cpuinfo", "model name") or platform.machine()


def _field(file: str, name: str) -> str:
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
