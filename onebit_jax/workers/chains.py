"""Transformations that may stand around an exchange, before it and after it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import jax
import optax
from optax import contrib

from onebit_jax.workers.states import declared, distances, is_declared
from onebit_jax.workers.worker_local import is_worker_local, worker_local_nodes

_REPLACEMENTS = {
    optax.MultiStepsState: ("optax.MultiSteps", "onebit_jax.accumulate"),
    optax.ApplyIfFiniteState: ("optax.apply_if_finite", "onebit_jax.skip_nonfinite"),
}


def check_wrappers(state: Any) -> None:
    """Refuses wrappers that cannot hold an exchange, and chains out of order.

    Args:
      state: an optimizer's state, or its shapes.

    Raises:
      ValueError: if an exchange stands inside a wrapper of Optax's that takes its state
        for the same on all workers, or after what it should stand in. Also if something
        follows, or rescales, steps that each worker takes by itself.
    """
    wrappers = tuple(_REPLACEMENTS)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, wrappers))
    for node in nodes:
        if isinstance(node, wrappers) and _holds_exchange(node):
            wrapper, replacement = _REPLACEMENTS[type(node)]
            raise ValueError(
                f"{wrapper} cannot hold an exchange, because it takes what differs "
                f"from worker to worker for the same on all: use {replacement}."
            )
    nodes = jax.tree.leaves(state, is_leaf=_is_schedule_free)
    if distances(list(filter(_is_schedule_free, nodes))):
        raise ValueError(
            "contrib.schedule_free rescales steps of all workers, and not those that "
            "workers take by themselves: use zero_one_adam without it, and local_steps "
            "around it."
        )
    _check_chains(state)


def _holds_exchange(wrapper: Any) -> bool:
    """True of worker-local state, but for that which `per_worker` made of its own."""
    count = wrapper[0]
    own = count.axes if is_worker_local(count) else None
    return any(node.axes != own for node in worker_local_nodes(wrapper))


def _is_schedule_free(node: Any) -> bool:
    return isinstance(node, contrib.ScheduleFreeState)


def _check_chains(state: Any) -> None:
    """Refuses what waits, or skips, beside the exchange that it should hold.

    And what follows steps that each worker takes by itself.
    """
    for parts in _chains(state):
        for place, part in enumerate(parts):
            after = parts[place + 1 :]
            if any(map(_has_exchange, after)):
                _check_holds_exchange(part)
            # After a masked part there may be one for the other leaves.
            masked = isinstance(part, optax.MaskedState)
            if after and not masked and distances(part):
                raise ValueError(
                    "an optimizer whose workers take steps of their own is followed by "
                    "what does not see them: make it the last of a chain, and put a "
                    "factor or a schedule into its learning rate."
                )


def _check_holds_exchange(state: Any) -> None:
    for node in declared((state,)):
        if node.wrapper and not _has_exchange(node.inner):
            raise ValueError(
                f"{node.wrapper} decides what the optimizer inside it sees, and the "
                "exchange that follows would take its zeros for gradients: put the "
                f"exchange inside {node.wrapper}(...)."
            )


def _has_exchange(state: Any) -> bool:
    """True of worker-local state other than what workers keep of their own."""

    def is_known(node: Any) -> bool:
        return is_worker_local(node) or is_declared(node)

    def has(node: Any) -> bool:
        if not is_declared(node):
            return is_worker_local(node)
        inside = node.inner if node.wrapper else tuple(node)
        return not node.is_opaque and _has_exchange(inside)

    return any(map(has, jax.tree.leaves(state, is_leaf=is_known)))


def _chains(state: Any) -> list[list[Any]]:
    """The states of each chain's parts, in a row where chains are parts of chains."""
    nodes = jax.tree.leaves(state, is_leaf=_is_chain)
    found = [list(_parts(x)) for x in nodes if _is_chain(x)]
    return found + [deeper for parts in found for x in parts for deeper in _chains(x)]


def _parts(chain: Any) -> Iterator[Any]:
    for part in chain.values() if isinstance(chain, OrderedDict) else chain:
        if _is_chain(part):
            yield from _parts(part)
        else:
            yield part


def _is_chain(node: Any) -> bool:
    """True of the state of `optax.chain` and `optax.named_chain`."""
    return type(node) is tuple or isinstance(node, OrderedDict)
