"""The three operations in plain `jax.numpy`: their definition, compiled by XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._packing import ROWS, pack_signs, to_blocks, unpack_signs
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
    if not isinstance(decay, float):
        decay = jnp.asarray(decay, jnp.float32)
    return (1 - decay) * value + decay * momentum.astype(jnp.float32) + owed


def _by_chunks(
    at: Callable[[Any, int, Any], Any],
    length: int,
    unit: int,
    block_size: int,
    carry: Any,
) -> Any:
    """Works along an axis in chunks, then in units, then on what is left at once."""
    # The units are a loop, too: what follows a loop is no longer done in place.
    done, steps = 0, (max(1, _CHUNK // block_size) * unit, unit)
    for step in steps:
        first, number = done, (length - done) // step

        def body(i: Array, carry: Any, first: int = first, step: int = step) -> Any:
            return at(first + i * step, step, carry)

        carry = lax.fori_loop(0, number, body, carry)
        done += number * step
    return at(done, length - done, carry) if done < length else carry


def compress(
    value: Float[Array, " size"],
    error: Float[Array, " size"],
    momentum: Float32[Array, " size"] | None,
    decay: float | Array | None,
    block_size: int,
    scale: Scale,
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, " size"]]:
    """`pallas_kernels.compress` as XLA compiles it."""
    size, rows = value.size, (ROWS, block_size // ROWS)

    def whole(
        value: Array, error: Array, momentum: Array | None
    ) -> tuple[Array, Array, Array]:
        x = corrected_value(value, error, momentum, decay)
        blocks = x if x.ndim == 3 else to_blocks(x, block_size)
        counts = jnp.full(blocks.shape[0], block_size, jnp.int32)
        if x.size % block_size:
            counts = counts.at[-1].set(x.size % block_size)
        words, scales, new_error = quantise(blocks, counts, scale)
        if x.ndim == 1:
            new_error = new_error.reshape(-1)[: x.size]
        return words, scales, new_error.astype(error.dtype)

    def by_chunks(
        value: Array, error: Array, momentum: Array | None
    ) -> tuple[Array, Array, Array]:
        # Along the first axis, of blocks, or of values where the last block is cut.
        unit = 1 if value.ndim == 3 else block_size
        words, scales, _ = jax.eval_shape(whole, value, error, momentum)
        zeros = [jnp.zeros(x.shape, x.dtype) for x in (words, scales)]

        def compress_at(
            first: int | Array, length: int, carry: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            def part(x: Array) -> Array:
                return lax.dynamic_slice_in_dim(x, first, length)

            own = None if momentum is None else part(momentum)
            words, scales, error = carry
            new = whole(part(value), part(error), own)
            put = lax.dynamic_update_slice_in_dim
            return (
                put(words, new[0], first // unit, 0),
                put(scales, new[1], first // unit, 0),
                put(error, new[2], first, 0),
            )

        start = vary_as((*zeros, error), value, error, momentum, decay)
        return _by_chunks(compress_at, value.shape[0], unit, block_size, start)

    if size % block_size == 0:
        # As blocks from the start: XLA's CPU backend does not vectorise what goes
        # from one shape to another.
        value, error = value.reshape(-1, *rows), error.reshape(-1, *rows)
        momentum = None if momentum is None else momentum.reshape(-1, *rows)
    if size <= 2 * _CHUNK:
        result = whole(value, error, momentum)
    else:
        result = lax.platform_dependent(
            value, error, momentum, cpu=by_chunks, default=whole
        )
    words, scales, new_error = result
    return words, scales, new_error.reshape(size)


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
    zeros = vary_as(jnp.zeros((blocks, ROWS, width), jnp.float32), words, scales)
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

    def by_chunks(words: Array, scales: Array) -> Array:
        blocks, width = words.shape
        start = vary_as(jnp.zeros((blocks, ROWS, width), dtype), words, scales)

        def unpack_at(first: int | Array, length: int, values: Array) -> Array:
            part = (lax.dynamic_slice_in_dim(x, first, length) for x in (words, scales))
            new = unpack_signs(*part).astype(dtype)
            return lax.dynamic_update_slice_in_dim(values, new, first, 0)

        return _by_chunks(unpack_at, blocks, 1, ROWS * width, start)

    def whole(words: Array, scales: Array) -> Array:
        return unpack_signs(words, scales).astype(dtype)

    if size <= 2 * _CHUNK:
        values = whole(words, scales)
    else:
        values = lax.platform_dependent(words, scales, cpu=by_chunks, default=whole)
    return values.reshape(-1)[:size]
