"""The three operations of compression, in plain `jax.numpy`.

This is their definition, and what runs wherever XLA compiles it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import jax.numpy as jnp

from pallas_kernels._packing import pack_signs, to_blocks, unpack_signs

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Float32, Int32, UInt32

Scale = Literal["rms", "mean_abs"]


def _block_scales(
    x: Float32[Array, "b 32 w"], counts: Int32[Array, " b"], scale: Scale
) -> Float32[Array, " b"]:
    # A block without a single value divides by one: its scale is an exact zero.
    number = jnp.maximum(counts, 1).astype(jnp.float32)
    if scale == "rms":
        return jnp.sqrt(jnp.sum(x * x, axis=(1, 2)) / number)
    return jnp.sum(jnp.abs(x), axis=(1, 2)) / number


def _quantise(
    x: Float32[Array, "b 32 w"], counts: Int32[Array, " b"], scale: Scale
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float32[Array, "b 32 w"]]:
    scales = _block_scales(x, counts, scale)
    magnitude = scales[:, None, None]
    error = x - jnp.where(x >= 0, magnitude, -magnitude)
    return pack_signs(x), scales, error


def compress(
    value: Float[Array, " size"],
    error: Float[Array, " size"],
    *,
    block_size: int,
    scale: Scale = "rms",
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, " size"]]:
    r"""Compresses a buffer to one sign a value and one scale a block.

    .. math::
      x = value + error, \quad
      s_b = \sqrt{\textstyle\sum_{i \in b} x_i^2 / |b|}, \quad
      error' = x - s_b \, \mathrm{sign}(x)

    with |b| the number of values in block b that are not padding, and
    sign(0) = +1. A block of zeros has scale zero. A value that is not finite, or
    whose square overflows float32, makes its block's scale not finite.

    Args:
      value: what is to be sent, any size.
      error: what earlier calls owe, float32 or bfloat16.
      block_size: values a scale, a power of two of at least 32.
      scale: 'rms' as in the formula, or 'mean_abs' for :math:`\sum |x_i| / |b|`.

    Returns:
      The words, the block scales, and the new error in the dtype of `error`.

    Example:
      >>> import jax.numpy as jnp
      >>> words, scales, error = compress(
      ...     jnp.array([3.0, -3.0, 3.0]), jnp.zeros(3), block_size=32
      ... )
      >>> scales, error
      (Array([3.], dtype=float32), Array([0., 0., 0.], dtype=float32))

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888,
      Algorithm 1 (there with one scale a tensor).
    """
    size = value.size
    x = to_blocks(value.astype(jnp.float32) + error.astype(jnp.float32), block_size)
    first = jnp.arange(x.shape[0], dtype=jnp.int32) * block_size
    counts = jnp.minimum(size - first, block_size)
    words, scales, new_error = _quantise(x, counts, scale)
    return words, scales, new_error.reshape(-1)[:size].astype(error.dtype)


def average_and_recompress(
    words: UInt32[Array, "n b w"],
    scales: Float32[Array, "n b"],
    error: Float[Array, " size"],
    counts: Int32[Array, " b"],
    *,
    scale: Scale = "rms",
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, " size"]]:
    r"""Averages what n workers sent and compresses the average again.

    .. math::
      y = \frac{1}{n} \sum_r s_r \, \mathrm{sign}_r + error, \quad
      error' = y - s \, \mathrm{sign}(y)

    Args:
      words: packed signs of n workers.
      scales: their block scales.
      error: what earlier calls owe, of b blocks, float32 or bfloat16.
      counts: how many values of each block are not padding; the first ones are
        the values.
      scale: as in `compress`.

    Returns:
      The words, the block scales, and the new error, which is zero on padding.

    Example:
      >>> import jax.numpy as jnp
      >>> ones = jnp.full((2, 1, 1), 2**32 - 1, jnp.uint32)
      >>> _, scales, error = average_and_recompress(
      ...     ones, jnp.array([[1.0], [2.0]]), jnp.zeros(32), jnp.array([32])
      ... )
      >>> scales, error.sum()
      (Array([1.5], dtype=float32), Array(0., dtype=float32))

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888,
      Algorithm 1 (the server's half).
    """
    n, _, width = words.shape
    sent = unpack_signs(words) * scales[..., None, None]
    mean = jnp.sum(sent, axis=0) / n
    y = mean + error.astype(jnp.float32).reshape(mean.shape)
    place = jnp.arange(32 * width, dtype=jnp.int32).reshape(1, 32, width)
    is_value = place < counts[:, None, None]
    y = jnp.where(is_value, y, jnp.float32(0))
    new_words, new_scales, new_error = _quantise(y, counts, scale)
    new_error = jnp.where(is_value, new_error, jnp.float32(0))
    return new_words, new_scales, new_error.reshape(-1).astype(error.dtype)


def decompress(
    words: UInt32[Array, "b w"],
    scales: Float32[Array, " b"],
    size: int,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, " size"]:
    r"""Restores the values that signs and scales stand for: s_b · sign.

    Args:
      words: packed signs.
      scales: the scale of each block.
      size: how many values the blocks hold; the rest is padding.
      dtype: of the result.

    Returns:
      The values.

    Example:
      >>> import jax.numpy as jnp
      >>> decompress(jnp.array([[1]], jnp.uint32), jnp.array([0.5]), size=2)
      Array([ 0.5, -0.5], dtype=float32)
    """
    values = unpack_signs(words) * scales[:, None, None]
    return values.reshape(-1)[:size].astype(dtype)
