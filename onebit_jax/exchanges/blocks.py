"""Leaves in blocks: which are exchanged exactly, and where the others' blocks stand."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np

from onebit_jax.workers.arithmetic import joined_means

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jax.typing import DTypeLike
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


class Division(NamedTuple):
    """Leaves divided into those that are exchanged exactly and the others.

    Attributes:
      exact: places of the leaves that are averaged exactly.
      compressed: places of the others.
      layout: the others' blocks.
    """

    exact: tuple[int, ...]
    compressed: tuple[int, ...]
    layout: BlockLayout


def divide(
    shapes: Sequence[tuple[int, ...]],
    *,
    block_size: int,
    exact_below: int,
    exact_1d: bool,
    workers: int,
) -> Division:
    """Divides leaves by their shapes.

    Args:
      shapes: of the leaves.
      block_size: values a block.
      exact_below: leaves of fewer values are exchanged exactly, and empty ones.
      exact_1d: whether leaves of fewer than two dimensions are as well.
      workers: what the number of blocks is padded to a multiple of.

    Returns:
      The division.
    """
    sizes = [math.prod(shape) for shape in shapes]
    exact = tuple(
        i
        for i, shape in enumerate(shapes)
        if sizes[i] < max(1, exact_below) or (exact_1d and len(shape) < 2)
    )
    compressed = tuple(i for i in range(len(shapes)) if i not in exact)
    layout = BlockLayout(tuple(sizes[i] for i in compressed), block_size, workers)
    return Division(exact, compressed, layout)


def exact_means(
    leaves: Sequence[Float[Array, ...]],
    dtypes: Sequence[DTypeLike],
    axes: tuple[str, ...],
) -> list[Float[Array, ...]]:
    """The exact means of leaves, in one all-reduce of float32."""
    means = joined_means([x.astype(jnp.float32) for x in leaves], axes)
    return [mean.astype(dtype) for mean, dtype in zip(means, dtypes, strict=True)]
