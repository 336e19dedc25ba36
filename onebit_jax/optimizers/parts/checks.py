"""Checks of what optimizers with a frozen variance are made of."""

from __future__ import annotations

from typing import Any

from onebit_jax.exchanges.exchange import Exchange, exact_mean
from onebit_jax.optimizers.parts.freeze import FreezeRule


def check_parts(who: str, exchange: Any, freeze: Any) -> None:
    """Refuses parts that an optimizer with a frozen variance cannot use.

    Args:
      who: the optimizer's name, for error messages.
      exchange: what is to be an exchange of values with their scale.
      freeze: what is to be a freeze rule.

    Raises:
      TypeError: if a part is of another type, or the exchange returns votes.
    """
    if not isinstance(exchange, Exchange):
        raise TypeError(
            f"{who} needs an exchange, such as sign_mean('data'), got {exchange!r}."
        )
    if not isinstance(freeze, FreezeRule):
        raise TypeError(
            f"{who} needs a freeze rule, such as freeze_at(1000), got {freeze!r}."
        )
    if not exchange.keeps_scale:
        raise TypeError(
            f"{who} divides what is agreed by a variance, and votes have no scale: "
            f"give it an exchange such as sign_mean('data'), not {exchange!r}."
        )


def gradient_mean(given: Exchange | None, exchange: Exchange, name: str) -> Exchange:
    """The exchange of gradients beside one of momenta: the exact mean, or another.

    Args:
      given: that of an argument, or None.
      exchange: that of the momenta.
      name: the argument's, for error messages.

    Returns:
      An exchange over the same axes.

    Raises:
      TypeError: if it is not an exchange, or returns votes.
      ValueError: if it is over other axes.
    """
    if given is None:
        return exact_mean(exchange.axes)
    if not isinstance(given, Exchange):
        raise TypeError(
            f"{name} must be an exchange or None for the exact mean, got {given!r}."
        )
    if not given.keeps_scale:
        raise TypeError(
            f"a variance is learnt from what {name} returns, and votes have no scale: "
            f"give it an exchange such as quantized_mean('data', 4), not {given!r}."
        )
    if set(given.axes) != set(exchange.axes):
        raise ValueError(
            f"{name} must be over the axes of the exchange, {exchange.axes}, not over "
            f"{given.axes}."
        )
    return given
