"""Planar packing: one sign bit a value, 32 rows of a block in each word."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Float32, Int32, UInt32

ROWS = 32
"""Bits of a word, and so the rows of a block, and the fewest values in one."""
MAX_BLOCK_SIZE = 2**24
"""float32 holds every whole number up to it, as the GPU's form needs of places in a
block and of counts of its values."""


def check_block_size(block_size: int) -> None:
    """Refuses a block size that the operations cannot work with.

    Args:
      block_size: how many consecutive values share one scale.

    Raises:
      ValueError: if it is no power of two, less than 32, or more than 2**24.
    """
    is_in_range = ROWS <= block_size <= MAX_BLOCK_SIZE
    if not is_in_range or block_size & (block_size - 1):
        raise ValueError(
            f"block_size must be a power of two of at least {ROWS} and at "
            f"most {MAX_BLOCK_SIZE}, got {block_size}."
        )


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
    return lax.platform_dependent(x, cpu=pack_by_rows, default=pack_by_halves)


def pack_by_rows(x: Float[Array, "*blocks 32 w"]) -> UInt32[Array, "*blocks w"]:
    """`pack_signs` for XLA's CPU backend, which vectorises no reduction over rows."""
    words = jnp.zeros((*x.shape[:-2], x.shape[-1]), jnp.uint32)
    for row, values in enumerate(jnp.unstack(x, axis=-2)):
        words |= (values >= 0).astype(jnp.uint32) << row
    return words


def pack_by_halves(x: Float[Array, "*blocks 32 w"]) -> UInt32[Array, "*blocks w"]:
    """`pack_signs` in five steps instead of 32, for other backends."""
    words = (x >= 0).astype(jnp.uint32)
    while (rows := words.shape[-2] // 2) > 0:
        words = words[..., :rows, :] | words[..., rows:, :] << rows
    return words[..., 0, :]


def unpack_signs(
    words: UInt32[Array, "*blocks w"], magnitude: Float32[Array, "*blocks"]
) -> Float32[Array, "*blocks 32 w"]:
    """Unpacks words into values of one magnitude a block.

    Args:
      words: packed signs.
      magnitude: of each block's values; a negative one turns their signs.

    Returns:
      The magnitude where the bit is set, and its negative where it is not.

    Example:
      >>> import jax.numpy as jnp
      >>> unpack_signs(jnp.array([1], jnp.uint32), jnp.float32(2))[:3, 0]
      Array([ 2., -2., -2.], dtype=float32)
    """
    shape = (*words.shape[:-1], ROWS, words.shape[-1])
    rows = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2)
    # The bit, inverted, becomes the float's sign bit.
    sign = (~words[..., None, :] >> rows) << jnp.uint32(31)
    bits = lax.bitcast_convert_type(magnitude, jnp.uint32)[..., None, None]
    return lax.bitcast_convert_type(bits ^ sign, jnp.float32)


def unpack_bits(words: UInt32[Array, "*blocks w"]) -> UInt32[Array, "*blocks 32 w"]:
    """Unpacks words into their bits: 1 for a value of at least zero, else 0.

    Args:
      words: packed signs.

    Returns:
      The bits.

    Example:
      >>> import jax.numpy as jnp
      >>> unpack_bits(jnp.array([5], jnp.uint32))[:4, 0]
      Array([1, 0, 1, 0], dtype=uint32)
    """
    shape = (*words.shape[:-1], ROWS, words.shape[-1])
    rows = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2)
    return (words[..., None, :] >> rows) & jnp.uint32(1)


def to_blocks(
    x: Float[Array, " size"], block_size: int
) -> tuple[Float[Array, "b block_size"], Int32[Array, " b"]]:
    """Blocks of a flat buffer, the last one padded, and the counts of their values.

    Args:
      x: the buffer.
      block_size: number of values in a block.

    Returns:
      The blocks, padded with zeros, and how many values of each are not padding.

    Example:
      >>> import jax.numpy as jnp
      >>> to_blocks(jnp.array([1.0, 2.0, 3.0]), 2)[1]
      Array([2, 1], dtype=int32)
    """
    blocks = jnp.pad(x, (0, -x.size % block_size)).reshape(-1, block_size)
    counts = jnp.full(blocks.shape[0], block_size, jnp.int32)
    if x.size % block_size:
        counts = counts.at[-1].set(x.size % block_size)
    return blocks, counts
