"""The collectives of an exchange, by a model's shapes and a cluster's size."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import jax

import onebit_jax
from onebit_jax import Transfer
from train.core.exchange import EXCHANGES, WARMUP_BITS
from train.core.mesh import AXIS, DEVICE, HOST

if TYPE_CHECKING:
    from collections.abc import Mapping

Leaves = tuple[jax.ShapeDtypeStruct, ...]

SMALLEST = 34
"""Values of the smallest leaf that is not exchanged exactly."""

MEASURING, PERIOD = "compressed/measuring", onebit_jax.GrowthByMeanSquares().period
"""The stage of 1-bit Adam that measures the growth, one step of so many."""


@functools.lru_cache(maxsize=64)
def exchange_transfers(
    exchange: str, leaves: Leaves, hosts: int, gpus: int, *, hierarchical: bool = False
) -> tuple[Transfer, ...]:
    """The collectives of one exchange of a model's gradients, from a trace of it.

    Args:
      exchange: 'exact_mean', 'quantized_mean' for that of the trainers' warm-up, or a
        name of `train.core.exchange.EXCHANGES`.
      leaves: The gradients.
      hosts: How many.
      gpus: Those of each host.
      hierarchical: Whether a host's GPUs are one worker, whose share they exchange.

    Returns:
      The collectives.
    """
    by_bits = functools.partial(onebit_jax.quantized_mean, bits=WARMUP_BITS)
    exact = onebit_jax.exact_mean
    make = {"exact_mean": exact, "quantized_mean": by_bits, **EXCHANGES}[exchange]
    if hierarchical:
        whole = onebit_jax.hierarchical(make(HOST), within=DEVICE)
    else:
        whole = make((HOST, DEVICE))
    sizes = {HOST: hosts, DEVICE: gpus}
    # In two traces, as `stage_costs` adds all-reduces up: small leaves go exactly, and
    # wait for messages of their own.
    small = [] if exchange == "exact_mean" else [x for x in leaves if x.size < SMALLEST]
    large = [leaf for leaf in leaves if leaf not in small]
    return tuple(
        transfer
        for part in (large, small)
        for transfer in onebit_jax.stage_costs(whole, part, sizes)["every"]
    )


def growth_transfer(leaves: Leaves) -> Transfer:
    """The sums by which 1-bit Adam measures the growth, in one step of `PERIOD`."""
    size = sum(_growth_bytes(leaf.shape, leaf.dtype) for leaf in leaves)
    return Transfer("all-reduce", size, (HOST, DEVICE))


@functools.cache
def _growth_bytes(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> int:
    """Bytes of a leaf's sums, by which the stage that measures sends more."""
    tx = onebit_jax.onebit_adam(
        1.0, onebit_jax.sign_mean(AXIS), onebit_jax.freeze_at(1)
    )
    leaf = jax.ShapeDtypeStruct(shape, dtype)
    costs = onebit_jax.stage_costs(tx, leaf, {AXIS: 2})
    measuring, compressed = (
        sum(transfer.bytes for transfer in costs[stage])
        for stage in (MEASURING, "compressed")
    )
    return measuring - compressed


def mean_by_hosts(leaves: Leaves, gpus: int) -> tuple[Transfer, ...]:
    """The collectives of an exact mean inside each host, and then between hosts.

    Args:
      leaves: The gradients.
      gpus: GPUs of each host.

    Returns:
      A reduce-scatter inside, an all-reduce of each GPU's share between hosts, and an
      all-gather inside.
    """
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return (
        Transfer("reduce-scatter", size, (DEVICE,)),
        Transfer("all-reduce", math.ceil(size / gpus), (HOST,)),
        Transfer("all-gather", size, (DEVICE,)),
    )


def loss_transfer(axis_sizes: Mapping[str, int]) -> Transfer:
    """The mean of the loss over all GPUs, float32.

    The trainer's program is of all stages, and has it in every step, those of workers'
    own too.
    """
    return Transfer("all-reduce", 4, tuple(axis_sizes))
