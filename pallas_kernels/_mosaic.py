"""The three operations as Pallas kernels for Hopper GPUs and later (Mosaic GPU).

One program instance, a warpgroup of 128 lanes, takes a tile of whole blocks: as many
as 128 words hold, or one block of more words. Lane by lane it reads the 32 rows of
its words, so that neighbouring lanes read neighbouring values, and holds them in
registers from the first pass to the last. What does not fill a tile at a buffer's end
is left to XLA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _reference
from pallas_kernels._compat import REFS_MAY_VARY, interpret_parameters
from pallas_kernels._packing import ROWS
from pallas_kernels._tile import TILE, Tile, zeros_like
from pallas_kernels._varying import vary_as, varying

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

    from pallas_kernels._reference import Scale


def _places(tile: Tile) -> Array:
    # Given as an input: the kernels' own iota is known to some versions alone.
    numbers = np.arange(tile.blocks * tile.words, dtype=np.int32)
    return jnp.asarray(numbers.reshape(tile.shape))


def _owner_and_word(tile: Tile, ref: Any) -> tuple[Array, Array]:
    """For each word that is worked on, its block in the tile, and place in the part."""
    places = ref[...]
    return places >> (tile.words.bit_length() - 1), places & (tile.words - 1)


def _set(words: Array, row: int) -> Array:
    return (words & jnp.uint32(1 << row)) != jnp.uint32(0)


def _root(x: Array) -> Array:
    # Mosaic has no square root. Zero, infinity and NaN are their own roots. A
    # subnormal number stays as it is: to a GPU it may be zero, whose rsqrt is infinite.
    tiny = jnp.finfo(jnp.float32).tiny
    return jnp.where((x >= tiny) & (x < jnp.inf), x * lax.rsqrt(x), x)


def _quantise(
    tile: Tile,
    owner: Array,
    rows: Callable[[Any], Sequence[Array]],
    divisor: Callable[[Any], Any],
    scale: Scale,
    words_ref: Any,
    scales_ref: Any,
    put_error: Callable[[Any, int, Array], None],
) -> None:
    """Writes signs, scales and errors of a tile.

    Args:
      tile: the tile.
      owner: the block of each word, as by `_owner_and_word`.
      rows: gives the 32 rows of a part of the blocks.
      divisor: gives the number of values of a block.
      scale: as of `pallas_kernels.compress`.
      words_ref: where the signs go.
      scales_ref: where the scales go.
      put_error: writes the error of a part's row.
    """
    # A block of one part stays in registers; a longer one is read again.
    in_registers = rows(0) if tile.parts == 1 else None

    def measure(part: int | Array, sums: Array) -> Array:
        words = jnp.uint32(0)
        for row, x in enumerate(in_registers or rows(part)):
            sums = sums + (x * x if scale == "rms" else jnp.abs(x))
            bit = jnp.uint32(1 << row)
            words = words | jnp.where(x >= 0, bit, jnp.uint32(0))
        words_ref[tile.at(part)] = words
        return sums

    sums = _for_parts(tile, measure, zeros_like(owner))

    def scale_of(block: int | Array) -> Array:
        mean = jnp.sum(jnp.where(owner == block, sums, 0.0)) / divisor(block)
        result = _root(mean) if scale == "rms" else mean
        scales_ref[tile.block(block)] = result
        return result

    scales = tile.per_block(owner, scale_of)

    def leave(part: int | Array, nothing: Array) -> Array:
        for row, x in enumerate(in_registers or rows(part)):
            put_error(part, row, x - jnp.where(x >= 0, scales, -scales))
        return nothing

    _for_parts(tile, leave, jnp.int32(0))


def _for_parts(tile: Tile, body: Callable[[Any, Array], Array], start: Array) -> Array:
    return (
        body(0, start) if tile.parts == 1 else lax.fori_loop(0, tile.parts, body, start)
    )


def _compress_kernel(tile: Tile, scale: Scale, with_momentum: bool, *refs: Any) -> None:
    places_ref, value_ref, *momentum_refs, old_error_ref = refs[:-3]
    words_ref, scales_ref, error_ref = refs[-3:]
    owner, _ = _owner_and_word(tile, places_ref)

    def rows(part: int | Array) -> list[Array]:
        result = []
        for row in range(ROWS):
            x = tile.load(value_ref, row, part)
            if with_momentum:
                momentum_ref, weights_ref = momentum_refs
                kept = weights_ref[0] * tile.load(momentum_ref, row, part)
                x = weights_ref[1] * x + kept
            result.append(x + tile.load(old_error_ref, row, part))
        return result

    put_error = functools.partial(_put, tile, error_ref)
    size = jnp.float32(tile.block_size)
    _quantise(
        tile, owner, rows, lambda _: size, scale, words_ref, scales_ref, put_error
    )


def _put(tile: Tile, ref: Any, part: int | Array, row: int, value: Array) -> None:
    tile.store(ref, row, part, value)


def _average_kernel(tile: Tile, scale: Scale, workers: int, *refs: Any) -> None:
    places_ref, sent_ref, sent_scales_ref, counts_ref, old_error_ref = refs[:5]
    words_ref, scales_ref, error_ref = refs[5:]
    owner, word = _owner_and_word(tile, places_ref)

    def count(block: int | Array) -> Array:
        return counts_ref[tile.block(block)].astype(jnp.float32)

    # Exact: a block has at most 2**24 values.
    counts = tile.per_block(owner, count)

    def is_value(row: int, part: int | Array) -> Array:
        place = word + (part + row * tile.parts) * tile.words
        return place.astype(jnp.float32) < counts

    def rows(part: int | Array) -> list[Array]:
        def add(worker: int | Array, totals: list[Array]) -> list[Array]:
            words = sent_ref[(worker, *tile.at(part))]
            scales = tile.per_block(
                owner, lambda block: sent_scales_ref[worker, tile.block(block)]
            )
            return [
                total + jnp.where(_set(words, row), scales, -scales)
                for row, total in enumerate(totals)
            ]

        totals = lax.fori_loop(0, workers, add, [zeros_like(owner)] * ROWS)
        return [
            jnp.where(
                is_value(row, part),
                total / workers + tile.load(old_error_ref, row, part),
                0.0,
            )
            for row, total in enumerate(totals)
        ]

    def divisor(block: int | Array) -> Array:
        return jnp.maximum(count(block), 1.0)

    def put_error(part: int | Array, row: int, error: Array) -> None:
        _put(tile, error_ref, part, row, jnp.where(is_value(row, part), error, 0.0))

    _quantise(tile, owner, rows, divisor, scale, words_ref, scales_ref, put_error)


def _decompress_kernel(tile: Tile, *refs: Any) -> None:
    places_ref, words_ref, scales_ref, out_ref = refs
    owner, _ = _owner_and_word(tile, places_ref)
    scales = tile.per_block(owner, lambda block: scales_ref[tile.block(block)])

    def unpack(part: int | Array, nothing: Array) -> Array:
        words = words_ref[tile.at(part)]
        for row in range(ROWS):
            value = jnp.where(_set(words, row), scales, -scales)
            tile.store(out_ref, row, part, value)
        return nothing

    _for_parts(tile, unpack, jnp.int32(0))


def _kernel(
    tiles: int, interpreted: bool, body: Callable[..., None], types: Any
) -> Callable[..., Any]:
    kernel: Any = pl.kernel(
        body,
        out_type=types,
        mesh=plgpu.Mesh(grid=(tiles,), grid_names=(TILE,)),
        interpret=interpret_parameters() if interpreted else False,
    )
    return kernel


def _launch(
    kernel: Callable[..., None],
    tiles: int,
    inputs: Sequence[Array],
    error: Array,
    outputs: Sequence[tuple[tuple[int, ...], DTypeLike]],
    interpreted: bool,
) -> tuple[list[Array], Array]:
    """Runs a kernel that takes inputs and an error to outputs and a new error."""
    *inputs, error = vary_as([*inputs, error], *inputs, error)
    kind = jax.typeof(error).manual_axis_type
    types = [
        jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)
        for shape, dtype in outputs
    ]
    run = functools.partial(_kernel, tiles, interpreted)
    if varying(error) and not REFS_MAY_VARY:
        new = jax.ShapeDtypeStruct(error.shape, error.dtype, manual_axis_type=kind)
        *results, made = run(kernel, [*types, new])(*inputs, error)
        # The kernel writes only what it reaches of a new buffer.
        reached = outputs[-1][0][0]
        if reached < error.shape[0]:
            made = made.at[reached:].set(error[reached:])
        return results, made

    def in_place(*refs: Any) -> None:
        # The error stands behind the inputs, and is the last output too.
        kernel(*refs, refs[len(inputs)])

    @jax.jit  # a Ref in a GPU's memory is made inside of jit alone
    def update(error: Array, *inputs: Array) -> tuple[list[Array], Array]:
        error_ref = jax.new_ref(error, memory_space=plgpu.GMEM)
        results = run(in_place, types)(*inputs, error_ref)
        return results, error_ref[...]

    return update(error, *inputs)


def compress(
    value: Array,
    error: Array,
    momentum: Array | None,
    decay: float | Array | None,
    block_size: int,
    scale: Scale,
    *,
    interpreted: bool,
) -> tuple[Array, Array, Array]:
    """`pallas_kernels.compress` as a kernel, what fills no tile left to XLA."""
    size, tile_size = value.size, Tile(block_size).blocks * block_size
    tiles = size // tile_size
    head = tiles * tile_size
    options = {"decay": decay, "block_size": block_size, "scale": scale}
    by_xla = functools.partial(_reference.compress, **options)
    by_kernel = functools.partial(
        _compress_tiles, tiles=tiles, interpreted=interpreted, **options
    )
    if not tiles:
        return by_xla(value, error, momentum)
    if head == size:
        return by_kernel(value, error, momentum)
    tail = jax.tree.map(lambda x: x[head:], (value, error, momentum))
    words_of_tail, scales_of_tail, error_of_tail = by_xla(*tail)
    if size % block_size == 0:
        # The kernel works in place, and leaves what stands behind its tiles.
        error = error.at[head:].set(error_of_tail)
        words, scales, new_error = by_kernel(value, error, momentum)
    else:
        # A block that is cut short cannot be viewed as one: the head is copied.
        whole = jax.tree.map(lambda x: x[:head], (value, error, momentum))
        words, scales, error_of_head = by_kernel(*whole)
        new_error = jnp.concatenate([error_of_head, error_of_tail])
    words = jnp.concatenate([words, words_of_tail])
    return words, jnp.concatenate([scales, scales_of_tail]), new_error


def _compress_tiles(
    value: Array,
    error: Array,
    momentum: Array | None,
    *,
    decay: float | Array | None,
    block_size: int,
    scale: Scale,
    tiles: int,
    interpreted: bool,
) -> tuple[Array, Array, Array]:
    """Compresses the first tiles of buffers of whole blocks.

    Returns:
      The words and scales of these tiles, and the whole error: what lies behind them
      is as it was.
    """
    tile, width = Tile(block_size), block_size // ROWS
    value, error, momentum = jax.tree.map(
        lambda x: x.reshape(-1, ROWS, width), (value, error, momentum)
    )
    inputs = [_places(tile), value]
    if momentum is not None and decay is not None:
        weights = jnp.stack([jnp.asarray(w, jnp.float32) for w in (decay, 1 - decay)])
        inputs += [momentum, weights]
    kernel = functools.partial(_compress_kernel, tile, scale, momentum is not None)
    blocks = tiles * tile.blocks
    outputs = [((blocks, width), jnp.uint32), ((blocks,), jnp.float32)]
    (words, scales), new_error = _launch(
        kernel, tiles, inputs, error, outputs, interpreted
    )
    return words, scales, new_error.reshape(-1)


def average_and_recompress(
    words: Array,
    scales: Array,
    error: Array,
    counts: Array,
    scale: Scale,
    *,
    interpreted: bool,
) -> tuple[Array, Array, Array]:
    """`pallas_kernels.average_and_recompress` as a kernel, the last blocks by XLA."""
    workers, total, width = words.shape
    tile = Tile(width * ROWS)
    blocks = total // tile.blocks * tile.blocks
    plain = functools.partial(_reference.average_and_recompress, scale=scale)
    if not blocks:
        return plain(words, scales, error, counts)
    head = blocks * tile.block_size
    rest = None
    if blocks < total:
        last = (words[:, blocks:], scales[:, blocks:], error[head:], counts[blocks:])
        rest = plain(*last)
        error = error.at[head:].set(rest[2])
    kernel = functools.partial(_average_kernel, tile, scale, workers)
    shapes = [((blocks, width), jnp.uint32), ((blocks,), jnp.float32)]
    (new_words, new_scales), new_error = _launch(
        kernel,
        blocks // tile.blocks,
        [_places(tile), words, scales, counts],
        error.reshape(total, ROWS, width),
        shapes,
        interpreted,
    )
    if rest is not None:
        new_words = jnp.concatenate([new_words, rest[0]])
        new_scales = jnp.concatenate([new_scales, rest[1]])
    return new_words, new_scales, new_error.reshape(-1)


def decompress(
    words: Array, scales: Array, size: int, dtype: DTypeLike, *, interpreted: bool
) -> Array:
    """`pallas_kernels.decompress` as a kernel, the last blocks by XLA."""
    total, width = words.shape
    tile = Tile(width * ROWS)
    blocks = total // tile.blocks * tile.blocks
    if not blocks:
        return _reference.decompress(words, scales, size, dtype)
    places, words, scales = vary_as([_places(tile), words, scales], words, scales)
    kind = jax.typeof(words).manual_axis_type
    shape = (blocks, ROWS, width)
    new = jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)
    body = functools.partial(_decompress_kernel, tile)
    run = _kernel(blocks // tile.blocks, interpreted, body, new)
    values = run(places, words, scales)
    values = values.reshape(-1)
    if blocks == total:
        return values[:size]
    rest = size - blocks * tile.block_size
    last = _reference.decompress(words[blocks:], scales[blocks:], max(rest, 0), dtype)
    return jnp.concatenate([values, last])[:size]
