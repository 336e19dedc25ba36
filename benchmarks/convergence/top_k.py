"""The largest values of each block as an exchange, with both errors."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

import onebit_jax

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32, Int32, UInt32

KEPT = 32
"""How many values of a block are sent: the bits of a word."""

_BITS = 11
"""Those of a place among 1,024 and of a sign."""


@dataclasses.dataclass(frozen=True)
class TopK(onebit_jax.Codec):
    """The 32 largest of 1,024 values: their places and signs, and two magnitudes.

    They are sent from the largest on. So the first half needs no bit to say that its
    magnitude is the mean of that half, and each value has one of four levels.

    Word j of the first eleven has bit j of each value's place and sign.
    """

    block_size = 1024
    words = _BITS + 2  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def encode(
        self, blocks: Float32[Array, "b 1024"], counts: Int32[Array, " b"]
    ) -> UInt32[Array, "b 13"]:
        """The words of the largest values of each block."""
        del counts
        sizes, places = lax.top_k(jnp.abs(blocks), KEPT)
        negative = jnp.take_along_axis(blocks, places, axis=1) < 0
        numbers = places.astype(jnp.uint32) | negative.astype(jnp.uint32) << 10
        bits = (numbers[:, None] >> _range(1, _BITS, 1)) & 1
        packed = jnp.sum(bits << _range(1, 1, KEPT), axis=2, dtype=jnp.uint32)
        means = jnp.mean(sizes.reshape(-1, 2, KEPT // 2), axis=2)
        words = lax.bitcast_convert_type(means, jnp.uint32)
        return jnp.concatenate([packed, words], axis=1)

    def decode(self, words: UInt32[Array, "*n 13"]) -> Float32[Array, "*n 1024"]:
        """Blocks of zeros but for the largest values."""
        rows = words.reshape(-1, self.words)
        bits = (rows[:, :_BITS, None] >> _range(1, 1, KEPT)) & 1
        numbers = jnp.sum(bits << _range(1, _BITS, 1), axis=1, dtype=jnp.uint32)
        means = lax.bitcast_convert_type(rows[:, _BITS:], jnp.float32)
        sizes = jnp.repeat(means, KEPT // 2, axis=1)
        values = jnp.where(numbers >> 10 == 1, -sizes, sizes)
        at = jnp.arange(len(rows))[:, None], (numbers & 1023).astype(jnp.int32)
        blocks = jnp.zeros((len(rows), self.block_size), jnp.float32)
        blocks = blocks.at[at].set(values)
        return blocks.reshape(*words.shape[:-1], self.block_size)


def _range(*shape: int) -> UInt32[Array, "*shape"]:
    return jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
