"""The blocks that one instance of a GPU kernel works on, lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._packing import ROWS

if TYPE_CHECKING:
    from jax import Array

LANES = 128
TILE = "tile"


class Tile:
    """The blocks that one program instance works on.

    Attributes:
      blocks: blocks of a tile.
      words: words of a block that are worked on at a time, a part of the block.
      parts: how many such parts a block has.
    """

    def __init__(self, block_size: int) -> None:
        width = block_size // ROWS
        self.block_size = block_size
        self.blocks = max(1, LANES // width)
        self.words = min(width, LANES)
        self.parts = width // self.words
        self.shape = (self.blocks, self.words)

    def block(self, number: int | Array) -> Any:
        """The place in the buffer of one of the tile's blocks."""
        return lax.axis_index(TILE) * self.blocks + number

    def at(self, part: int | Array) -> tuple[Any, Any]:
        """Where the tile's blocks lie in the buffer, and the part's words in each."""
        return pl.ds(self.block(0), self.blocks), pl.ds(part * self.words, self.words)

    def load(self, ref: Any, row: int, part: int | Array) -> Array:
        """A row of the tile, in float32."""
        blocks, words = self.at(part)
        return ref[blocks, row, words].astype(jnp.float32)

    def store(self, ref: Any, row: int, part: int | Array, value: Array) -> None:
        """Writes a row of the tile."""
        blocks, words = self.at(part)
        ref[blocks, row, words] = value.astype(ref.dtype)

    def per_block(self, owner: Array, number: Callable[[Any], Any]) -> Array:
        """A float32 number of each block, given to every word of the block."""

        def put(block: int | Array, numbers: Array) -> Array:
            return jnp.where(owner == block, number(block), numbers)

        return lax.fori_loop(0, self.blocks, put, zeros_like(owner))


def zeros_like(like: Array) -> Array:
    """Zeros in the layout of another array, so that a loop can carry them."""
    return (like * 0).astype(jnp.float32)
