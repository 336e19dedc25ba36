"""The speed of the operations of compression, Mosaic's beside XLA's form."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from benchmarks.kernels.measure import measure as measure_kernels
from benchmarks.on_gpu.part import read
from benchmarks.on_gpu.sizes import BLOCK_SIZE

if TYPE_CHECKING:
    from benchmarks.on_gpu.part import Record
    from benchmarks.on_gpu.sizes import Sizes


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part."""
    record.device(sizes)
    # Kept beside the times, so that the page marks those of wrong kernels.
    record.write(right=read(record.file.parent, "right").get(sizes.mosaic))
    for results in measure_kernels(
        sizes.kernels,
        ("xla", sizes.mosaic),
        BLOCK_SIZE,
        sizes.repeats,
        sizes.calls,
        sizes.operations,
    ):
        record.write(results=dataclasses.asdict(results))
