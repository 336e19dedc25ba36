"""Planar packing: one sign bit a value, 32 rows of a block in each word."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Float32, UInt32

_ROWS = 32  # bits of a word
MIN_BLOCK_SIZE = _ROWS


def pack_signs(x: Float[Array, "*blocks 32 w"]) -> UInt32[Array, "*blocks w"]:
    r"""Packs the signs of blocks of values into words.

    Bit k of word j is 1 if and only if ``x[..., k, j] >= 0``, so that zero, and
    negative zero, count as positive and NaN as negative. Elements of a word lie in
    different rows: packing is elementwise over rows, which every backend lowers
    to vector instructions.

    Args:
      x: values, in blocks of 32 rows.

    Returns:
      The words.

    Example:
      >>> import jax.numpy as jnp
      >>> pack_signs(jnp.array([[-1.0, 2.0]] + [[-1.0, -1.0]] * 30 + [[0.0, -1.0]]))
      Array([2147483648,          1], dtype=uint32)
    """
    shifts = lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 2)
    return jnp.sum((x >= 0).astype(jnp.uint32) << shifts, axis=-2, dtype=jnp.uint32)


def unpack_signs(words: UInt32[Array, "*blocks w"]) -> Float32[Array, "*blocks 32 w"]:
    """Unpacks words into signs: the inverse of `pack_signs` up to magnitude.

    Args:
      words: packed signs.

    Returns:
      +1 where the bit is set and -1 where it is not.

    Example:
      >>> import jax.numpy as jnp
      >>> unpack_signs(jnp.array([1], jnp.uint32))[:3, 0]
      Array([ 1., -1., -1.], dtype=float32)
    """
    shape = (*words.shape[:-1], _ROWS, words.shape[-1])
    shifts = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2)
    bits = (words[..., None, :] >> shifts) & jnp.uint32(1)
    return jnp.where(bits == 1, jnp.float32(1), jnp.float32(-1))


def to_blocks(x: Float[Array, " size"], block_size: int) -> Float[Array, "b 32 w"]:
    """Views a flat buffer as blocks of 32 rows, its tail padded with zeros."""
    blocks = -(-x.size // block_size)
    padded = jnp.pad(x, (0, blocks * block_size - x.size))
    return padded.reshape(blocks, _ROWS, block_size // _ROWS)
