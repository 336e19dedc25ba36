"""The collectives of an exchange, by a model's shapes and a cluster's size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onebit_jax
from onebit_jax import Transfer as Transfer
from train.core.exchange import EXCHANGES
from train.core.mesh import DEVICE, HOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import jax


def exchange_transfers(
    exchange: str,
    leaves: Sequence[jax.ShapeDtypeStruct],
    axis_sizes: Mapping[str, int],
    *,
    hierarchical: bool = False,
) -> tuple[Transfer, ...]:
    """The collectives of one exchange of a model's gradients.

    Args:
      exchange: 'exact_mean', or a name of `train.core.exchange.EXCHANGES`.
      leaves: The gradients.
      axis_sizes: Hosts, and GPUs of each, by the names of these axes.
      hierarchical: Whether a host's GPUs are one worker, whose share they exchange.

    Returns:
      The collectives in their order.
    """
    make = {"exact_mean": onebit_jax.exact_mean, **EXCHANGES}[exchange]
    if hierarchical:
        whole = onebit_jax.hierarchical(make(HOST), within=DEVICE)
    else:
        whole = make(tuple(axis_sizes))
    return whole.wire_cost(list(leaves), axis_sizes)


def mean_by_hosts(
    leaves: Sequence[jax.ShapeDtypeStruct], gpus: int
) -> tuple[Transfer, ...]:
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
    """The mean of the loss over all GPUs, float32, which every step has."""
    return Transfer("all-reduce", 4, tuple(axis_sizes))
