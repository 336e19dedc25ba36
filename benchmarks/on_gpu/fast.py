"""The speed of the operations of compression, beside XLA's form and PyTorch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from benchmarks.kernels.measure import measure as measure_kernels
from benchmarks.on_gpu.device import device
from benchmarks.on_gpu.record import read
from benchmarks.on_gpu.sizes import BLOCK_SIZE

if TYPE_CHECKING:
    from benchmarks.kernels.operations import Operation
    from benchmarks.on_gpu.record import Record
    from benchmarks.on_gpu.sizes import Sizes


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part."""
    device(sizes)
    tests = read(record.file.parent, "right").get("tests", {})
    # Beside the times: those of a wrong kernel are told, and are none.
    record.write(right=tests.get(sizes.mosaic, {}).get("right", {}))

    def wanted(operation: Operation) -> bool:
        return operation.buffers == "donated" and operation.name in sizes.operations

    for results in measure_kernels(
        sizes.kernels,
        ("xla", sizes.mosaic),
        BLOCK_SIZE,
        sizes.repeats,
        sizes.calls,
        wanted,
        baselines=False,
    ):
        record.write(results=dataclasses.asdict(results))
        record.check()
