"""The three operations in plain `jax.numpy`: their definition, compiled by XLA.

Each is traced once a shape, by `jax.jit`, as a model asks for it once a leaf; XLA
compiles the calls as if they were written out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

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


def check_scale(scale: str) -> None:
    """Refuses a name that is no scale's.

    Args:
      scale: the name.

    Raises:
      ValueError: if it is not one of `Scale`.
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale must be 'rms' or 'mean_abs', got {scale!r}.")


# Values that a CPU's core keeps in its cache from the first pass over them to the last.
_CHUNK = 16_384
_UNROLLED = 8


def quantise(
    x: Float32[Array, "b 32 w"], counts: Int32[Array, " b"], scale: Scale
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float32[Array, "b 32 w"]]:
    """Signs, block scales and error of blocks whose padding is zero."""

    def size(values: Array) -> Array:
        return values * values if scale == "rms" else jnp.abs(values)

    total = lax.platform_dependent(
        x,
        cpu=lambda x: sum_by_rows(x, size),
        default=lambda x: jnp.sum(size(x), axis=(1, 2)),
    )
    # A block without a single value divides by one: its scale is an exact zero.
    mean = total / jnp.maximum(counts, 1).astype(jnp.float32)
    scales = jnp.sqrt(mean) if scale == "rms" else mean
    magnitude = scales[:, None, None]
    return pack_signs(x), scales, x - jnp.where(x >= 0, magnitude, -magnitude)


def sum_by_rows(
    x: Float32[Array, "b 32 w"], of: Callable[[Array], Array]
) -> Float32[Array, " b"]:
    """Sums for XLA's CPU backend, which vectorises no reduction over rows.

    By halves in a row: elementwise, and the error grows with log2(w) alone.

    Args:
      x: blocks.
      of: what is summed of their values.
    """
    sums = jnp.float32(0)
    for values in jnp.unstack(x, axis=1):
        sums = sums + of(values)
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def running_mean(
    value: Float[Array, "*shape"],
    momentum: Float32[Array, "*shape"] | None,
    decay: ArrayLike | None,
) -> Float32[Array, "*shape"]:
    r"""The value; with a momentum, its next value, in float32.

    .. math:: \beta \, momentum + (1 - \beta) \, value

    Args:
      value: the value; with a momentum, the gradient.
      momentum: the momentum, of the same shape; None for none.
      decay: :math:`\beta`; None for none.

    Returns:
      A float32 array of the same shape.

    Example:
      >>> print(running_mean(jnp.float32(1.0), jnp.float32(3.0), 0.5))
      2.0
    """
    value = value.astype(jnp.float32)
    if momentum is None or decay is None:
        return value
    if not isinstance(decay, float):
        decay = jnp.asarray(decay, jnp.float32)
    return (1 - decay) * value + decay * momentum.astype(jnp.float32)


def _by_chunks(
    at: Callable[[Any, int, int, Any], Any], size: int, block_size: int, carry: Any
) -> Any:
    """Works on whole blocks in chunks, then one by one, then on one that is cut short.

    Args:
      at: works on some blocks: takes the number of the first of them, how many blocks
        and how many values they are, and the carry; returns the new carry.
      size: values in all.
      block_size: values of a block.
      carry: the carry at the start.

    Returns:
      The carry at the end.
    """
    # All three are loops: after a loop, XLA works in place only in another loop.
    whole = size // block_size
    done, steps = 0, (max(1, _CHUNK // block_size), 1)
    for step in steps:
        first, number = done, (whole - done) // step

        def body(i: Array, carry: Any, first: int = first, step: int = step) -> Any:
            return at(first + i * step, step, step * block_size, carry)

        if number:
            carry = lax.fori_loop(0, number, body, carry)
        done += number * step
    if rest := size % block_size:
        # Hidden from the compiler, which removes a loop that runs once.
        once = lax.optimization_barrier(jnp.int32(1))
        carry = lax.fori_loop(0, once, lambda _, c: at(whole, 1, rest, c), carry)
    return carry


def _most_at_once(block_size: int) -> int:
    """The largest size that is not cut into chunks: two chunks, or a longer block."""
    return max(2 * _CHUNK, block_size)


def _row_shape(size: int, block_size: int) -> tuple[int, ...]:
    """The shape of the pieces that a buffer is viewed in: rows of block_size / 32.

    A piece is as large as the greatest common divisor of the two sizes. If that is less
    than a row, pieces are single values, of shape ().

    XLA's CPU backend does not vectorise what goes from one shape to another unless the
    last dimensions stay.
    """
    width = block_size // ROWS
    rows = math.gcd(size, block_size) // width
    return (rows, width) if rows else ()


def compress(
    value: Float[Array, " size"],
    error: Float[Array, " size"],
    momentum: Float32[Array, " size"] | None,
    decay: float | Array | None,
    block_size: int,
    scale: Scale,
    counts: Int32[Array, " b"] | None = None,
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, " size"]]:
    """`pallas_kernels.compress` as XLA compiles it."""
    size = value.size
    shape = (-1, *_row_shape(size, block_size))
    value, error = value.reshape(shape), error.reshape(shape)
    momentum = None if momentum is None else momentum.reshape(shape)
    options = {"decay": decay, "block_size": block_size, "scale": scale}
    whole = functools.partial(_compress_whole, **options)
    if size <= _most_at_once(block_size):
        result = whole(value, error, momentum, counts)
    else:
        by_chunks = functools.partial(_compress_by_chunks, **options)
        result = lax.platform_dependent(
            value, error, momentum, counts, cpu=by_chunks, default=whole
        )
    words, scales, new_error = result
    return words, scales, new_error.reshape(size)


# A decay that is a number stays one of the program's constants.
compress_by_number = jax.jit(compress, static_argnums=(3, 4, 5))
compress_by_array = jax.jit(compress, static_argnums=(4, 5))


def _compress_whole(
    value: Float[Array, "*rows"],
    error: Float[Array, "*rows"],
    momentum: Float32[Array, "*rows"] | None,
    counts: Int32[Array, " b"] | None,
    *,
    decay: float | Array | None,
    block_size: int,
    scale: Scale,
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, "*rows"]]:
    """Compresses all values at once, viewed in rows as by `_row_shape`."""
    x = running_mean(value, momentum, decay) + error.astype(jnp.float32)
    padded, cut = to_blocks(x.reshape(-1), block_size)
    padded = padded.reshape(-1, ROWS, block_size // ROWS)
    number = cut if counts is None else counts
    words, scales, new_error = quantise(padded, number, scale)
    if counts is not None:
        place = jnp.arange(block_size, dtype=jnp.int32).reshape(padded.shape[1:])
        is_value = place[None] < counts[:, None, None]
        new_error = jnp.where(is_value, new_error, jnp.float32(0))
    new_error = new_error.reshape(-1)[: x.size].reshape(error.shape)
    return words, scales, new_error.astype(error.dtype)


def _compress_by_chunks(
    value: Float[Array, "*rows"],
    error: Float[Array, "*rows"],
    momentum: Float32[Array, "*rows"] | None,
    counts: Int32[Array, " b"] | None,
    *,
    decay: float | Array | None,
    block_size: int,
    scale: Scale,
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, "*rows"]]:
    """Compresses chunk by chunk, the new error in the place of the old."""
    row = math.prod(value.shape[1:])
    blocks = -(-value.size // block_size)
    words = jnp.zeros((blocks, block_size // ROWS), jnp.uint32)
    scales = jnp.zeros(blocks, jnp.float32)

    def compress_at(
        first: int | Array, number: int, values: int, carry: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        words, scales, error = carry
        start = first * (block_size // row)
        parts = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, start, values // row),
            (value, error, momentum),
        )
        cut = counts
        if cut is not None:
            cut = lax.dynamic_slice_in_dim(cut, first, number)
        new = _compress_whole(
            parts[0],
            parts[1],
            parts[2],
            cut,
            decay=decay,
            block_size=block_size,
            scale=scale,
        )
        put = lax.dynamic_update_slice_in_dim
        return (
            put(words, new[0], first, 0),
            put(scales, new[1], first, 0),
            put(error, new[2], start, 0),
        )

    carry = vary_as((words, scales, error), value, error, momentum, decay)
    return _by_chunks(compress_at, value.size, block_size, carry)


@functools.partial(jax.jit, static_argnames="scale")
def average_and_recompress(
    words: UInt32[Array, "n b w"],
    scales: Float32[Array, "n b"],
    error: Float[Array, " size"],
    counts: Int32[Array, " b"],
    scale: Scale,
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, " size"]]:
    """`pallas_kernels.average_and_recompress` as XLA compiles it."""
    size, shape = error.size, (words.shape[1], ROWS, words.shape[2])
    whole = functools.partial(_average_whole, scale=scale)
    arguments = words, scales, error.reshape(shape), counts
    if size <= _most_at_once(ROWS * words.shape[2]):
        result = whole(*arguments)
    else:
        by_chunks = functools.partial(_average_by_chunks, scale=scale)
        result = lax.platform_dependent(*arguments, cpu=by_chunks, default=whole)
    new_words, new_scales, new_error = result
    return new_words, new_scales, new_error.reshape(size)


def _average_whole(
    words: UInt32[Array, "n b w"],
    scales: Float32[Array, "n b"],
    error: Float[Array, "b 32 w"],
    counts: Int32[Array, " b"],
    *,
    scale: Scale,
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, "b 32 w"]]:
    """Averages all blocks at once."""
    n, _, width = words.shape

    def add(worker: ArrayLike, total: Float32[Array, "b 32 w"]) -> Array:
        return total + unpack_signs(words[worker], scales[worker])

    # One worker after another: a sum over an axis would unpack all copies first.
    zeros = vary_as(jnp.zeros(error.shape, jnp.float32), words, scales)
    total = lax.fori_loop(0, n, add, zeros, unroll=min(n, _UNROLLED))
    y = total / n + error.astype(jnp.float32)
    place = jnp.arange(32 * width, dtype=jnp.int32).reshape(1, 32, width)
    is_value = place < counts[:, None, None]
    y = jnp.where(is_value, y, jnp.float32(0))
    new_words, new_scales, new_error = quantise(y, counts, scale)
    new_error = jnp.where(is_value, new_error, jnp.float32(0))
    return new_words, new_scales, new_error.astype(error.dtype)


def _average_by_chunks(
    words: UInt32[Array, "n b w"],
    scales: Float32[Array, "n b"],
    error: Float[Array, "b 32 w"],
    counts: Int32[Array, " b"],
    *,
    scale: Scale,
) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, "b 32 w"]]:
    """Averages chunk by chunk, the new error in the place of the old."""
    blocks, _, width = error.shape
    new_words = jnp.zeros((blocks, width), jnp.uint32)
    new_scales = jnp.zeros(blocks, jnp.float32)

    def average_at(
        first: int | Array, number: int, values: int, carry: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        del values

        def part(x: Array, axis: int = 0) -> Array:
            return lax.dynamic_slice_in_dim(x, first, number, axis)

        # Copied by a loop that runs once, hidden from the compiler, which removes one.
        # A kernel that reads parts of several large arrays is not vectorised, nor one
        # that knows the counts.
        received = part(words, 1), part(scales, 1), part(counts)
        once = lax.optimization_barrier(jnp.int32(1))
        empty = jax.tree.map(lambda x: vary_as(jnp.zeros_like(x), x), received)
        sent, sizes, numbers = lax.fori_loop(0, once, lambda *_: received, empty)
        new = _average_whole(sent, sizes, part(carry[2]), numbers, scale=scale)
        return jax.tree.map(
            lambda x, y: lax.dynamic_update_slice_in_dim(x, y, first, 0), carry, new
        )

    carry = vary_as((new_words, new_scales, error), words, scales, error, counts)
    return _by_chunks(average_at, error.size, ROWS * width, carry)


@functools.partial(jax.jit, static_argnames=("size", "dtype"))
def decompress(
    words: UInt32[Array, "b w"],
    scales: Float32[Array, " b"],
    size: int,
    dtype: DTypeLike,
    into: Float[Array, " size"] | None = None,
) -> Float[Array, " size"]:
    """`pallas_kernels.decompress` as XLA compiles it."""
    block_size = ROWS * words.shape[1]

    def by_chunks(words: Array, scales: Array, start: Array | None) -> Array:
        shape = _row_shape(size, block_size)
        unit = math.prod(shape)
        if start is None:
            start = jnp.zeros(size, dtype)
        start = vary_as(start.reshape(-1, *shape), words, scales)

        def unpack_at(
            first: int | Array, number: int, values: int, carry: Array
        ) -> Array:
            part = (lax.dynamic_slice_in_dim(x, first, number) for x in (words, scales))
            new = unpack_signs(*part).astype(dtype).reshape(-1)[:values]
            place = first * (block_size // unit)
            new = new.reshape(-1, *shape)
            return lax.dynamic_update_slice_in_dim(carry, new, place, 0)

        return _by_chunks(unpack_at, size, block_size, start).reshape(size)

    def whole(words: Array, scales: Array, start: Array | None) -> Array:
        del start
        return unpack_signs(words, scales).astype(dtype).reshape(-1)[:size]

    if size <= _most_at_once(block_size):
        return whole(words, scales, None)
    return lax.platform_dependent(words, scales, into, cpu=by_chunks, default=whole)
