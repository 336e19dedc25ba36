"""The collectives of an exchange, by a model's shapes and a cluster's size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.plan import wire_formulas
from train.plan.wire_formulas import Transfer as Transfer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import jax

    from train.plan.config import ExchangeName


def exchange_transfers(
    exchange: ExchangeName,
    leaves: Sequence[jax.ShapeDtypeStruct],
    axis_sizes: Mapping[str, int],
    *,
    hierarchical: bool = False,
) -> tuple[Transfer, ...]:
    """The collectives of one exchange of a model's gradients.

    Args:
      exchange: Its name in `onebit_jax`.
      leaves: The gradients.
      axis_sizes: Hosts, and GPUs of each, by the names of these axes.
      hierarchical: Whether a host's GPUs are one worker, whose share they exchange.

    Returns:
      The collectives in their order.
    """
    if exchange == "exact_mean":
        return wire_formulas.exact(leaves, tuple(axis_sizes))
    return wire_formulas.compressed(
        exchange, leaves, axis_sizes, hierarchical=hierarchical
    )


def power_transfers(
    leaves: Sequence[jax.ShapeDtypeStruct],
    axis_sizes: Mapping[str, int],
    *,
    compressed: bool,
) -> tuple[Transfer, ...]:
    """The collective that 1-bit Adam's growth of the variance needs, with the loss.

    Args:
      leaves: The gradients.
      axis_sizes: As for `exchange_transfers`.
      compressed: Whether after the freeze, where a step exchanges a part of the rows'
        and columns' power and not all.

    Returns:
      An all-reduce over all GPUs.
    """
    share = 1 / wire_formulas.LINES_PERIOD if compressed else 1.0
    return (wire_formulas.power(leaves, tuple(axis_sizes), share=share),)
