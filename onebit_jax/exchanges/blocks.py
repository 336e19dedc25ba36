"""Leaves in blocks: which are exchanged exactly, and where the others' blocks stand."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np

from onebit_jax.workers.arithmetic import parted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax import Array
    from jaxtyping import Float, Float32, Int32


class BlockLayout(NamedTuple):
    """The places of each leaf's blocks among the blocks of all leaves, in one row.

    Every leaf begins a block of its own, so that leaves of different magnitude
    never share a scale; blocks of padding make their number a multiple of the workers'.

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
        """Blocks of all leaves, padding included."""
        return self.served_blocks * self.workers

    @property
    def slices(self) -> tuple[slice, ...]:
        """The places of each leaf's blocks."""
        ends = tuple(itertools.accumulate(self.blocks))
        return tuple(
            slice(end - blocks, end)
            for end, blocks in zip(ends, self.blocks, strict=True)
        )

    def counts(self) -> Int32[Array, " total_blocks"]:
        """The number of values of each block, without padding."""
        partial = [
            (rows.stop - 1, size - (rows.stop - rows.start - 1) * self.block_size)
            for rows, size in zip(self.slices, self.sizes, strict=True)
            if size % self.block_size
        ]
        used = sum(self.blocks)
        place = np.arange(used, self.total_blocks, dtype=np.int32)
        place = np.append(place, np.array([p for p, _ in partial], np.int32))
        number = np.zeros(self.total_blocks - used, np.int32)
        number = np.append(number, np.array([c for _, c in partial], np.int32))
        full = jnp.full(self.total_blocks, self.block_size, jnp.int32)
        return full.at[place].set(number)

    def joined(
        self, leaves: Sequence[Float[Array, ...]]
    ) -> Float32[Array, "total_blocks block_size"]:
        """The leaves' values as blocks, in float32, padded with zeros."""
        flat = []
        for leaf, blocks in zip(leaves, self.blocks, strict=True):
            padding = blocks * self.block_size - leaf.size
            flat.append(jnp.pad(leaf.astype(jnp.float32).reshape(-1), (0, padding)))
        unused = self.total_blocks - sum(self.blocks)
        flat.append(jnp.zeros(unused * self.block_size, jnp.float32))
        return jnp.concatenate(flat).reshape(-1, self.block_size)

    def parted(
        self, blocks: Float[Array, "total_blocks block_size"]
    ) -> list[Float[Array, " size"]]:
        """The inverse of `joined`: each leaf's values, flat."""
        # By rows, whose number fits in 32 bits where that of values may not.
        rows = parted(blocks, [each.start for each in self.slices], self.blocks)
        return [
            each.reshape(-1)[:size] for each, size in zip(rows, self.sizes, strict=True)
        ]


class Division(NamedTuple):
    """Leaves divided by their sizes.

    Attributes:
      exact: places of the leaves that are averaged exactly.
      large: places of those that are encoded each by itself.
      small: places of those that are encoded together, in one buffer of whole blocks:
        a program of a kernel for each would take long to compile.
      layout: the blocks of the large leaves and then of the small ones.
    """

    exact: tuple[int, ...]
    large: tuple[int, ...]
    small: tuple[int, ...]
    layout: BlockLayout

    @property
    def small_layout(self) -> BlockLayout:
        """The blocks of the small leaves alone, without padding behind them."""
        sizes = self.layout.sizes[len(self.large) :]
        return BlockLayout(sizes, self.layout.block_size, 1)


def divide(
    shapes: Sequence[tuple[int, ...]],
    *,
    block_size: int,
    is_exact: Callable[[tuple[int, ...]], bool],
    small_below: int,
    workers: int,
) -> Division:
    """Divides leaves by their shapes.

    Args:
      shapes: of the leaves.
      block_size: values a block.
      is_exact: whether a leaf of a shape is exchanged exactly, as empty ones must be.
      small_below: leaves of fewer values are encoded together.
      workers: what the number of blocks is padded to a multiple of.

    Returns:
      The division.
    """
    exact, large, small = [], [], []
    for i, shape in enumerate(shapes):
        size = math.prod(shape)
        if is_exact(shape):
            exact.append(i)
        # Padded to whole blocks, which must not be far larger than they are.
        elif size < small_below and block_size <= small_below:
            small.append(i)
        else:
            large.append(i)
    sizes = tuple(math.prod(shapes[i]) for i in (*large, *small))
    layout = BlockLayout(sizes, block_size, workers)
    return Division(tuple(exact), tuple(large), tuple(small), layout)
