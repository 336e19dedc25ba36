"""The three operations of compression, whatever computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels import _reference
from pallas_kernels._choose import mosaic
from pallas_kernels._packing import ROWS, check_block_size, unpack_signs

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Float32, Int32, UInt32

    from pallas_kernels._choose import Implementation
    from pallas_kernels._reference import Scale


def _check_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} must be of shape {shape}, got {array.shape}.")


def compress(
    value: Float[Array, " size"],
    error: Float[Array, " size"],
    *,
    block_size: int,
    scale: Scale = "rms",
    momentum: Float32[Array, " size"] | None = None,
    decay: float | Array | None = None,
    counts: Int32[Array, " b"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, " size"]]:
    r"""Compresses a buffer to one sign a value and one scale a block.

    .. math::
      x = value + error, \quad
      s_b = \sqrt{\textstyle\sum_{i \in b} x_i^2 / |b|}, \quad
      error' = x - s_b \, \mathrm{sign}(x)

    with |b| the number of values in block b that are not padding, and
    sign(0) = +1. With a momentum, its update is part of the pass over memory:

    .. math::
      x = \beta \, momentum + (1 - \beta) \, value + error

    A block of zeros has scale zero. A value that is not finite makes its block's scale
    not finite, and so does a block whose sum of squares ('mean_abs': of magnitudes)
    overflows float32, as 1,024 values of 5.8e17 do (of 3.4e35). Squares below
    float32's smallest normal number may be taken for zero.

    Args:
      value: what is to be sent, of any size; with a momentum, the gradient.
      error: the error of earlier calls, float32 or bfloat16.
      block_size: how many consecutive values share one scale; a power of two from 32 to
        2**24.
      scale: 'rms' as in the formula, or 'mean_abs' for :math:`\sum |x_i| / |b|`.
      momentum: the momentum that the gradient is added to.
      decay: :math:`\beta`, given with the momentum.
      counts: how many values of each block are not padding, which is zero in value,
        momentum and error, and in the new error; None where only the last block of the
        buffer may be cut short.
      implementation: 'xla', 'mosaic' (a kernel for NVIDIA GPUs from Hopper on) or
        'mosaic_interpreted' (the same, slow, on a CPU); None for 'xla', and for
        'mosaic' on GPUs where that was measured to be faster: none yet.

    Returns:
      The words, the block scales, and the new error in the dtype of `error`.

    Raises:
      ValueError: if an argument is not one of these, or the implementation is not
        one that runs here.

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
    check_block_size(block_size)
    _reference.check_scale(scale)
    if (momentum is None) != (decay is None):
        raise ValueError("give momentum and decay together, or neither.")
    _check_shape("value", value, (value.size,))
    _check_shape("error", error, value.shape)
    if momentum is not None:
        _check_shape("momentum", momentum, value.shape)
    if counts is not None:
        _check_shape("counts", counts, (value.size // block_size,))
    arguments = (value, error, momentum, decay, block_size, scale)
    if kernels := mosaic(implementation, "compress", value):
        interpreted = implementation == "mosaic_interpreted"
        result = kernels.compress(*arguments, interpreted=interpreted)
        if counts is None:
            return result
        words, scales, new_error = result
        return _without_padding(words, scales, new_error, counts, scale)
    if isinstance(decay, float):
        return _reference.compress_by_number(*arguments, counts)
    return _reference.compress_by_array(*arguments, counts)


def _without_padding(
    words: UInt32[Array, "b w"],
    scales: Float32[Array, " b"],
    error: Float[Array, " size"],
    counts: Int32[Array, " b"],
    scale: Scale,
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, " size"]]:
    """The result for blocks whose padding took part in their scales, as zeros."""
    block_size = ROWS * words.shape[1]
    share = jnp.maximum(counts, 1).astype(jnp.float32) / block_size
    cut = counts < block_size
    larger = scales / (jnp.sqrt(share) if scale == "rms" else share)
    larger = jnp.where(cut, larger, scales)
    change = unpack_signs(words, larger - scales).reshape(-1, block_size)
    place = jnp.arange(block_size, dtype=jnp.int32)[None]
    right = jnp.where(
        place < counts[:, None],
        error.reshape(-1, block_size).astype(jnp.float32) - change,
        jnp.float32(0),
    )
    return words, larger, right.reshape(-1).astype(error.dtype)


def average_and_recompress(
    words: UInt32[Array, "n b w"],
    scales: Float32[Array, "n b"],
    error: Float[Array, " size"],
    counts: Int32[Array, " b"],
    *,
    scale: Scale = "rms",
    implementation: Implementation | None = None,
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, " size"]]:
    r"""Averages what n workers sent and compresses the average again.

    .. math::
      y = \frac{1}{n} \sum_r s_r \, \mathrm{sign}_r + error, \quad
      error' = y - s \, \mathrm{sign}(y)

    Args:
      words: packed signs of n workers, w words for each block of 32 w values.
      scales: their block scales.
      error: the error of earlier calls, of b blocks, float32 or bfloat16.
      counts: how many values of each block are not padding; the first ones are
        the values.
      scale: as in `compress`.
      implementation: 'xla', 'mosaic' (a kernel for NVIDIA GPUs from Hopper on) or
        'mosaic_interpreted' (the same, slow, on a CPU); None for 'xla', and for
        'mosaic' on GPUs where that was measured to be faster: none yet.

    Returns:
      The words, the block scales, and the new error, which is zero on padding.

    Raises:
      ValueError: if the shapes do not belong together, 32 w is no block size that
        `compress` takes, or the implementation is not one that runs here.

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
    _reference.check_scale(scale)
    workers, blocks, width = words.shape
    check_block_size(ROWS * width)
    _check_shape("scales", scales, (workers, blocks))
    _check_shape("error", error, (blocks * ROWS * width,))
    _check_shape("counts", counts, (blocks,))
    arguments = (words, scales, error, counts, scale)
    if kernels := mosaic(implementation, "average_and_recompress", words):
        interpreted = implementation == "mosaic_interpreted"
        return kernels.average_and_recompress(*arguments, interpreted=interpreted)
    return _reference.average_and_recompress(*arguments)


def decompress(
    words: UInt32[Array, "b w"],
    scales: Float32[Array, " b"],
    size: int,
    dtype: DTypeLike = jnp.float32,
    *,
    into: Float[Array, " size"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, " size"]:
    r"""Restores the values that signs and scales stand for: s_b · sign.

    Elementwise, so that XLA fuses it with what is done to the values.

    Args:
      words: packed signs, w words for each block of 32 w values.
      scales: the scale of each block.
      size: how many values the blocks hold; the rest is padding.
      dtype: of the result.
      into: an array of that size and dtype whose buffer the result may take, and which
        is copied where it is needed still; its values do not matter.
      implementation: as in `compress`.

    Returns:
      The values.

    Raises:
      ValueError: if there are fewer values than `size`, 32 w is no block size that
        `compress` takes, `into` is of another type, or the implementation is not one
        that runs here.

    Example:
      >>> import jax.numpy as jnp
      >>> decompress(jnp.array([[1]], jnp.uint32), jnp.array([0.5]), size=2)
      Array([ 0.5, -0.5], dtype=float32)
    """
    if into is not None and (into.shape != (size,) or into.dtype != dtype):
        raise ValueError(
            f"into must be of shape {(size,)} and dtype {jnp.dtype(dtype)}, got "
            f"{into.shape} and {into.dtype}."
        )
    check_block_size(ROWS * words.shape[1])
    _check_shape("scales", scales, words.shape[:1])
    if not 0 <= size <= ROWS * words.size:
        raise ValueError(
            f"size must be from 0 to {ROWS * words.size}, the values that the words "
            f"hold, got {size}."
        )
    arguments = (words, scales, size, dtype)
    if kernels := mosaic(implementation, "decompress", words):
        interpreted = implementation == "mosaic_interpreted"
        return kernels.decompress(*arguments, interpreted=interpreted)
    return _reference.decompress(*arguments, into=into)
