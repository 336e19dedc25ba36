"""How the leaves of a tree are laid into the blocks of one bucket."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jaxtyping import Int32


class BlockLayout(NamedTuple):
    """Where each leaf's blocks stand in the bucket that all leaves share.

    Every leaf begins a block of its own, so that leaves of different magnitude
    never share a scale; blocks of nothing make the bucket divisible by the workers.

    Attributes:
      sizes: values of each leaf.
      block_size: values a block.
      workers: number of workers; each serves an equal run of blocks.
    """

    sizes: tuple[int, ...]
    block_size: int
    workers: int

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each leaf."""
        return tuple(-(-size // self.block_size) for size in self.sizes)

    @property
    def served_blocks(self) -> int:
        """Blocks that each worker serves, padding included; at least one."""
        return max(1, -(-sum(self.blocks) // self.workers))

    @property
    def total_blocks(self) -> int:
        """Blocks of the bucket, padding included."""
        return self.served_blocks * self.workers

    @property
    def slices(self) -> tuple[slice, ...]:
        """The blocks of each leaf in the bucket."""
        ends = tuple(itertools.accumulate(self.blocks))
        return tuple(
            slice(end - blocks, end)
            for end, blocks in zip(ends, self.blocks, strict=True)
        )

    def counts(self) -> Int32[Array, " total_blocks"]:
        """How many values of each block are not padding."""
        partial = [
            (part.stop - 1, size - (part.stop - part.start - 1) * self.block_size)
            for part, size in zip(self.slices, self.sizes, strict=True)
            if size % self.block_size
        ]
        used = sum(self.blocks)
        place = np.arange(used, self.total_blocks, dtype=np.int32)
        place = np.append(place, np.array([p for p, _ in partial], np.int32))
        number = np.zeros(self.total_blocks - used, np.int32)
        number = np.append(number, np.array([c for _, c in partial], np.int32))
        full = jnp.full(self.total_blocks, self.block_size, jnp.int32)
        return full.at[place].set(number)


def layout_of(
    shapes: Sequence[tuple[int, ...]], block_size: int, workers: int
) -> BlockLayout:
    """The layout of leaves of these shapes."""
    return BlockLayout(tuple(math.prod(s) for s in shapes), block_size, workers)
