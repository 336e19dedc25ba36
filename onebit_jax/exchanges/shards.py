"""An exchange's state with one of its own for each shard of the leaves."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from onebit_jax.workers.specs import LeafSpecs
from onebit_jax.workers.worker_local import WorkerLocal, is_worker_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array


NESTED = (
    "hierarchical and per_shard cannot be put inside one another: give either an "
    "exchange between workers, such as sign_mean('host')."
)


class PerShardState(NamedTuple):
    """States of an exchange, of shards.

    Attributes:
      groups: for each set of axes that leaves are sharded over, in the order of the
        leaves, the exchange's state of a shard of these leaves, with an axis of
        shards after that of the workers.
      specs: the partitions of the leaves, without arrays.
    """

    groups: tuple[Any, ...]
    specs: LeafSpecs


def add_shard_axis(
    state: Any, shards: int, names: tuple[str, ...], *, inside: bool
) -> Any:
    """Adds an axis of shards after the worker axis of a state's worker-local arrays.

    Args:
      state: of an exchange, made for one shard.
      shards: how many of them this program's arrays hold.
      names: the mesh axes that the shards are divided over.
      inside: whether these are axes of workers too: devices inside a host.

    Returns:
      The state, (workers, shards, ...) for each array of (workers, ...).

    Raises:
      TypeError: if the exchange divides its own state over further axes.
    """

    def of_node(node: WorkerLocal) -> WorkerLocal:
        if node.specs:
            raise TypeError(NESTED)
        first = node.axes[0] if len(node.axes) == 1 else node.axes
        value = jax.tree.map(
            lambda x: jnp.repeat(x[:, None], shards, axis=1), node.value
        )
        spec = PartitionSpec(first, names or None)
        return dataclasses.replace(
            node,
            value=value,
            axes=(*node.axes, *names) if inside else node.axes,
            # Of a node without arrays, too, so that it says what it is part of.
            specs=(spec,) * max(1, len(jax.tree.leaves(value))),
            shard_axes=node.shard_axes + 1,
        )

    return _map_nodes(of_node, state)


def of_shard(state: Any, axes: tuple[str, ...]) -> Any:
    """The state of the one shard that is here, for the exchange over `axes`."""

    def of_node(node: WorkerLocal) -> WorkerLocal:
        value = jax.tree.map(lambda x: x[:, 0], node.value)
        return WorkerLocal(value, axes, node.resizing)

    return _map_nodes(of_node, state)


def put_shard(state: Any, new: Any) -> Any:
    """The state with new values of the one shard that is here."""
    return jax.tree.map(
        lambda node, new: (
            dataclasses.replace(
                node, value=jax.tree.map(lambda x: x[:, None], new.value)
            )
            if is_worker_local(node)
            else new
        ),
        state,
        new,
        is_leaf=is_worker_local,
    )


def _map_nodes(function: Callable[[WorkerLocal], Any], state: Any) -> Any:
    def of(node: Array | WorkerLocal) -> Any:
        return function(node) if isinstance(node, WorkerLocal) else node

    return jax.tree.map(of, state, is_leaf=is_worker_local)
