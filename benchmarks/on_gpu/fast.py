"""The speed of the operations of compression, beside XLA's form and PyTorch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from benchmarks.kernels.measure import measure as measure_kernels
from benchmarks.on_gpu.device import device
from benchmarks.on_gpu.record import read
from benchmarks.on_gpu.sizes import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.kernels.measure import Results
    from benchmarks.kernels.operations import Operation
    from benchmarks.on_gpu.record import Record
    from benchmarks.on_gpu.sizes import Sizes


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part."""
    device(sizes, record.file.parent)
    tests = read(record.file.parent, "right").get("tests", {})
    # Kept beside the times, so that the page marks those of wrong kernels.
    record.write(right=tests.get(sizes.mosaic, {}).get("right", {}))
    for results in in_order(sizes):
        record.write(results=dataclasses.asdict(results))
        record.check()


def in_order(sizes: Sizes) -> Iterator[Results]:
    """Measures Mosaic's operations after all others.

    A kernel that hangs or breaks the device ends what is measured after it.

    Args:
      sizes: The sizes.

    Yields:
      All results so far, after each operation.
    """
    before = None
    for by_mosaic in (False, True):

        def wanted(each: Operation, by_mosaic: bool = by_mosaic) -> bool:
            if each.buffers != "donated" or each.name not in sizes.operations:
                return False
            return (each.implementation == sizes.mosaic) == by_mosaic

        now = before
        for results in measure_kernels(
            sizes.kernels,
            ("xla", sizes.mosaic),
            BLOCK_SIZE,
            sizes.repeats,
            sizes.calls,
            wanted,
            baselines=False,
        ):
            now = _together(before, results)
            yield now
        before = now


def _together(before: Results | None, results: Results) -> Results:
    if before is None:
        return results
    return dataclasses.replace(
        before,
        rows=before.rows + results.rows,
        skipped=list(dict.fromkeys(before.skipped + results.skipped)),
    )
