"""Random buffers for `benchmarks.kernels`, and the bytes that operations must move."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array

WORKERS = 8
ADAM, STEP = "Adam's step", "all three and the parameters"
DEFAULT = "the whole step of onebit_adam"
"""Whole steps: of `optax.adam`, of the operations alone, and of the library."""


class Inputs(NamedTuple):
    """The buffers of a worker in a compressed step.

    Attributes:
      value: Its gradient, float32.
      error: Its error.
      momentum: The momentum of the step before.
      received: The signs of all workers on the share that it serves.
      received_scales: Their scales.
      server_error: The error of the share.
      counts: Values in each block of the share.
      words: The agreed signs.
      scales: Their scales.
      nu: The frozen variance.
      params: The parameters.
    """

    value: Array
    error: Array
    momentum: Array
    received: Array
    received_scales: Array
    server_error: Array
    counts: Array
    words: Array
    scales: Array
    nu: Array
    params: Array


def make_inputs(size: int, block_size: int) -> Inputs:
    """Random buffers of a size."""
    keys = iter(jax.random.split(jax.random.key(0), 6))
    blocks, share = _block_counts(size, block_size)
    width = block_size // 32
    value = jax.random.normal(next(keys), (size,))
    first = jnp.arange(share, dtype=jnp.int32) * block_size
    return Inputs(
        value=value,
        error=0.5 * value[::-1],
        momentum=0.5 * jnp.roll(value, size // 2),
        received=jax.random.bits(next(keys), (WORKERS, share, width), jnp.uint32),
        received_scales=jax.random.uniform(next(keys), (WORKERS, share)),
        server_error=jax.random.normal(next(keys), (share * block_size,)),
        counts=jnp.clip(size - first, 0, block_size),
        words=jax.random.bits(next(keys), (blocks, width), jnp.uint32),
        scales=jax.random.uniform(next(keys), (blocks,)),
        nu=value**2,
        params=2 * value,
    )


def bytes_moved(size: int, block_size: int) -> dict[str, int]:
    """The bytes that each operation must read and write, by the command's table."""
    width = block_size // 32
    blocks, _ = _block_counts(size, block_size)
    packed = blocks * (width + 1)

    def average(workers: int) -> int:
        share = -(-blocks // workers)
        received = workers * (width + 1) + block_size + 1
        return share * (received + block_size + width + 1)

    numbers = {
        "compress": 3 * size + packed,
        "compress with momentum": 4 * size + packed,
        "average and recompress": average(WORKERS),
        "decompress": packed + size,
        "decompress and apply": packed + 3 * size,
        ADAM: 7 * size,
    }
    ends = numbers["compress with momentum"] + numbers["decompress and apply"] + size
    numbers[STEP] = ends + average(WORKERS)
    # Its lead reads the momentum before, too; the one worker averages all blocks.
    numbers[DEFAULT] = ends + average(1) + size
    return {operation: 4 * count for operation, count in numbers.items()}


def _block_counts(size: int, block_size: int) -> tuple[int, int]:
    """The blocks of a buffer, and those of them that a worker serves."""
    blocks = -(-size // block_size)
    return blocks, -(-blocks // WORKERS)
