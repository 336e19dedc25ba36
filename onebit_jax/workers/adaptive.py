"""A warning of Optax's adaptive optimizers behind an exchange of signs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import optax

from onebit_jax.workers.worker_local import is_worker_local

_ADAPTIVE = (
    optax.FactoredState,
    optax.ScaleByAdaDeltaState,
    optax.ScaleByAdamState,
    optax.ScaleByAdanState,
    optax.ScaleByAmsgradState,
    optax.ScaleByBeliefState,
    optax.ScaleByNovogradState,
    optax.ScaleByRmsState,
    optax.ScaleBySM3State,
    optax.ScaleByRStdDevState,
    optax.ScaleByRssState,
)
"""States that hold second moments of what a transformation was given."""


def warn_of_adaptive(state: Any) -> None:
    """Warns of second moments of values that have one magnitude a block.

    A transformation cannot see what follows it; the state of `optax.chain` has the
    states of all its parts in a row. An exchange of signs tells so by an attribute of
    its state, `has_one_magnitude`.

    Args:
      state: an optimizer's state, or its shapes.

    Warns:
      UserWarning: if one of Optax's adaptive optimizers follows such an exchange.
    """
    for parts in _chains(state):
        first = next((i for i, x in enumerate(parts) if _is_of_signs(x)), len(parts))
        if any(map(_is_adaptive, _leaves(parts[first + 1 :], _is_adaptive))):
            warnings.warn(
                "an adaptive optimizer follows an exchange that leaves one magnitude a "
                "block, so that its second moments do not tell coordinates apart: use "
                "onebit_jax.onebit_adam, or quantized_mean(axis, 4) before it.",
                stacklevel=3,
            )


def _chains(state: Any) -> list[list[Any]]:
    """The parts of each chain, in a row where chains are parts of chains."""
    found = [list(_parts(x)) for x in _leaves(state, _is_chain) if _is_chain(x)]
    return found + [deeper for parts in found for x in parts for deeper in _chains(x)]


def _parts(chain: tuple[Any, ...]) -> Iterator[Any]:
    for part in chain:
        if _is_chain(part):
            yield from _parts(part)
        else:
            yield part


def _leaves(tree: Any, is_leaf: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_leaf)


def _is_chain(node: Any) -> bool:
    return type(node) is tuple


def _is_adaptive(node: Any) -> bool:
    return isinstance(node, _ADAPTIVE)


def _is_of_signs(state: Any) -> bool:
    """True of the state of an exchange of signs, with nothing of an optimizer in it."""

    def is_exchange(node: Any) -> bool:
        return is_worker_local(node) or hasattr(node, "has_one_magnitude")

    nodes = _leaves(state, is_exchange)
    has_signs = any(hasattr(node, "has_one_magnitude") for node in nodes)
    return has_signs and all(map(is_exchange, nodes))
