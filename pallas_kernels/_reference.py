"""The three operations in plain `jax.numpy`: their definition, compiled by XLA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._packing import pack_signs, to_blocks, unpack_signs
from pallas_kernels._varying import vary_as

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike, DTypeLike
    from jaxtyping import Float, Float32, Int32, UInt32

Scale = Literal["rms", "mean_abs"]

# Values that a CPU's core keeps in its cache from the first pass over them to the last.
_CHUNK = 16_384
_UNROLLED = 8


def quantise(
    x: Float32[Array, "b 32 w"], counts: Int32[Array, " b"], scale: Scale
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float32[Array, "b 32 w"]]:
    """Signs, block scales and error of blocks whose padding is zero."""
    sums = jnp.float32(0)
    for row in range(x.shape[1]):
        values = x[:, row]
        sums = sums + (values * values if scale == "rms" else jnp.abs(values))
    # A block without a single value divides by one: its scale is an exact zero.
    mean = _sum_last(sums) / jnp.maximum(counts, 1).astype(jnp.float32)
    scales = jnp.sqrt(mean) if scale == "rms" else mean
    magnitude = scales[:, None, None]
    return pack_signs(x), scales, x - jnp.where(x >= 0, magnitude, -magnitude)


def _sum_last(x: Float32[Array, "b w"]) -> Float32[Array, " b"]:
    # By halves: elementwise, and the error grows with log2(w) alone.
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def corrected_value(
    value: Float[Array, "*shape"],
    error: Float[Array, "*shape"],
    momentum: Float32[Array, "*shape"] | None,
    decay: float | Array | None,
) -> Float32[Array, "*shape"]:
    """What is to be compressed: the value, or its running mean, and the error."""
    owed = error.astype(jnp.float32)
    value = value.astype(jnp.float32)
    if momentum is None or decay is None:
        return value + owed
    return (1 - decay) * value + decay * momentum + owed


def compress(
    value: Float[Array, " size"],
    error: Float[Array, " size"],
    momentum: Float32[Array, " size"] | None,
    decay: float | Array | None,
    block_size: int,
    scale: Scale,
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, " size"]]:
    """`pallas_kernels.compress` as XLA compiles it."""

    def whole(
        value: Array, error: Array, momentum: Array | None
    ) -> tuple[Array, Array, Array]:
        size = value.size
        x = to_blocks(corrected_value(value, error, momentum, decay), block_size)
        first = jnp.arange(x.shape[0], dtype=jnp.int32) * block_size
        counts = jnp.minimum(size - first, block_size)
        words, scales, new_error = quantise(x, counts, scale)
        return words, scales, new_error.reshape(-1)[:size].astype(error.dtype)

    def by_chunks(
        value: Array, error: Array, momentum: Array | None
    ) -> tuple[Array, Array, Array]:
        blocks = max(1, _CHUNK // block_size)
        chunk = blocks * block_size
        steps = value.size // chunk
        words, scales, _ = jax.eval_shape(whole, value, error, momentum)
        start = (jnp.zeros(words.shape, words.dtype), jnp.zeros(scales.shape), error)
        start = vary_as(start, value, error, momentum)

        def compress_at(
            place: ArrayLike, size: int, carry: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            words, scales, error = carry

            def part(x: Array) -> Array:
                return lax.dynamic_slice(x, (place * chunk,), (size,))

            own = None if momentum is None else part(momentum)
            new = whole(part(value), part(error), own)
            return (
                lax.dynamic_update_slice(words, new[0], (place * blocks, 0)),
                lax.dynamic_update_slice(scales, new[1], (place * blocks,)),
                lax.dynamic_update_slice(error, new[2], (place * chunk,)),
            )

        carry = lax.fori_loop(
            0, steps, lambda i, carry: compress_at(i, chunk, carry), start
        )
        rest = value.size - steps * chunk
        return compress_at(steps, rest, carry) if rest else carry

    if value.size <= 2 * _CHUNK:
        return whole(value, error, momentum)
    return lax.platform_dependent(value, error, momentum, cpu=by_chunks, default=whole)


def average_and_recompress(
    words: UInt32[Array, "n b w"],
    scales: Float32[Array, "n b"],
    error: Float[Array, " size"],
    counts: Int32[Array, " b"],
    scale: Scale,
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, " size"]]:
    """`pallas_kernels.average_and_recompress` as XLA compiles it."""
    n, blocks, width = words.shape

    def add(worker: ArrayLike, total: Float32[Array, "b 32 w"]) -> Array:
        return total + unpack_signs(words[worker], scales[worker])

    # One worker after another: a sum over an axis would unpack all copies first.
    zeros = vary_as(jnp.zeros((blocks, 32, width)), words, scales)
    total = lax.fori_loop(0, n, add, zeros, unroll=min(n, _UNROLLED))
    y = total / n + error.astype(jnp.float32).reshape(total.shape)
    place = jnp.arange(32 * width, dtype=jnp.int32).reshape(1, 32, width)
    is_value = place < counts[:, None, None]
    y = jnp.where(is_value, y, jnp.float32(0))
    new_words, new_scales, new_error = quantise(y, counts, scale)
    new_error = jnp.where(is_value, new_error, jnp.float32(0))
    return new_words, new_scales, new_error.reshape(-1).astype(error.dtype)


def decompress(
    words: UInt32[Array, "b w"],
    scales: Float32[Array, " b"],
    size: int,
    dtype: DTypeLike,
) -> Float[Array, " size"]:
    """`pallas_kernels.decompress` as XLA compiles it."""
    return unpack_signs(words, scales).reshape(-1)[:size].astype(dtype)
