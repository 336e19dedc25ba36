"""Chains of Optax, known by their states, and what in them is out of order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import jax
import optax

from onebit_jax.workers.nodes import has_attribute, nodes_with
from onebit_jax.workers.worker_local import is_worker_local


def chains(state: Any) -> list[list[Any]]:
    """The states of each chain's parts, in a row where chains are parts of chains.

    A transformation cannot see what follows it; the state of `optax.chain` has the
    states of all its parts, in their order.
    """
    nodes = jax.tree.leaves(state, is_leaf=_is_chain)
    found = [list(_parts(x)) for x in nodes if _is_chain(x)]
    return found + [deeper for parts in found for x in parts for deeper in chains(x)]


def check_chains(state: Any) -> None:
    """Refuses chains whose parts are out of order.

    Args:
      state: an optimizer's state, or its shapes.

    Raises:
      ValueError: if what waits, or skips, stands beside the exchange that it should
        hold, or something follows steps that each worker takes by itself.
    """
    for parts in chains(state):
        for place, part in enumerate(parts):
            after = parts[place + 1 :]
            if any(map(_has_exchange, after)):
                _check_holds_exchange(part)
            # After a masked part there may be one for the other leaves.
            masked = isinstance(part, optax.MaskedState)
            if after and not masked and nodes_with((part,), "local_params"):
                raise ValueError(
                    "an optimizer whose workers take steps of their own is followed by "
                    "what does not see them: make it the last of a chain, and put a "
                    "factor or a schedule into its learning rate."
                )


def _check_holds_exchange(state: Any) -> None:
    for node in jax.tree.leaves(state, is_leaf=_is_wrapper):
        if _is_wrapper(node) and not _has_exchange(node):
            raise ValueError(
                f"{node.wrapper} decides what the optimizer inside it sees, and the "
                "exchange that follows would take its zeros for gradients: put the "
                f"exchange inside {node.wrapper}(...)."
            )


def _has_exchange(state: Any) -> bool:
    """True of worker-local state other than the gradients that a wrapper keeps."""

    def is_known(node: Any) -> bool:
        return is_worker_local(node) or _is_wrapper(node)

    return any(
        _has_exchange(node.inner) if _is_wrapper(node) else is_worker_local(node)
        for node in jax.tree.leaves(state, is_leaf=is_known)
    )


def _parts(chain: Any) -> Iterator[Any]:
    for part in chain.values() if isinstance(chain, OrderedDict) else chain:
        if _is_chain(part):
            yield from _parts(part)
        else:
            yield part


def _is_chain(node: Any) -> bool:
    """True of the state of `optax.chain` and `optax.named_chain`."""
    return type(node) is tuple or isinstance(node, OrderedDict)


def _is_wrapper(node: Any) -> bool:
    """True of the state of `accumulate` and the like, which say so by an attribute."""
    return has_attribute(node, "wrapper")
