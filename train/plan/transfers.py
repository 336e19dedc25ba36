"""The collectives of an exchange, by a model's shapes and a cluster's size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

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


def growth_transfers(
    leaves: Sequence[jax.ShapeDtypeStruct],
    axis_sizes: Mapping[str, int],
    *,
    compressed: bool,
) -> tuple[Transfer, ...]:
    """The collectives of 1-bit Adam's growth of the variance, and of the loss.

    Args:
      leaves: The gradients.
      axis_sizes: As for `exchange_transfers`.
      compressed: True of a step after the freeze, with its share of what one step in a
        period sends; the growth sends nothing before.

    Returns:
      All-reduces over all GPUs.
    """
    axes = tuple(axis_sizes)
    growth = onebit_jax.GrowthByMeanSquares()
    loss = Transfer("all-reduce", jnp.dtype(jnp.float32).itemsize, axes)
    if not compressed:
        return (loss,)
    shares = [
        transfer._replace(bytes=-(-transfer.bytes // growth.period))
        for transfer in growth.wire_cost(list(leaves), axes)
    ]
    return *shares, loss
