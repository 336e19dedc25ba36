"""State that differs from worker to worker, declared as such."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from onebit_jax.workers.axes import varying_axes
from onebit_jax.workers.specs import is_spec

Resizing = Literal["average", "first", "concatenate", "drop"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkerLocal:
    """Arrays with a leading worker axis, each worker holding its own slice.

    Everything else in an optimizer's state is the same on all workers. This node
    tells a function which is which, wherever it stands inside `optax.chain`,
    `optax.masked` or `optax.inject_hyperparams`. One may stand inside another, over
    other axes: the leading axis is then the inner one's, and the next the outer one's.

    Attributes:
      value: a tree of arrays of shape (workers, ...); (1, ...) inside `shard_map`.
      axes: the mesh axes whose members are the workers.
      resizing: the meaning of the slices when the number of workers changes.
        'average': each worker holds its own share of a mean, which is preserved by
        giving every new worker the mean. 'first': each is given the first worker's.
        'concatenate': the slices are consecutive parts of one buffer, which is divided
        anew. 'drop': zeros take their place.
      specs: the partition of each leaf; None for the leading axis over `axes` alone.
        Over other axes than the workers' it tells where a leaf is placed.
      shard_axes: axes after the worker axis that number shards, each of which is
        resized by itself.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from onebit_jax import WorkerLocal
      >>> error = WorkerLocal(jnp.zeros((8, 3)), axes=('data',), resizing='average')
      >>> jax.tree.map(jnp.shape, error).value
      (8, 3)
    """

    value: Any
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    resizing: Resizing = dataclasses.field(metadata={"static": True})
    specs: tuple[PartitionSpec, ...] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    shard_axes: int = dataclasses.field(default=0, metadata={"static": True})

    def leading_axes(self) -> tuple[str, ...]:
        """The mesh axes that the leading axis is sharded over."""
        if not self.specs:
            return self.axes
        first = self.specs[0][0]
        return (first,) if isinstance(first, str) else tuple(first)


def is_worker_local(node: object) -> bool:
    """True of a node that is a `WorkerLocal`; for `is_leaf`."""
    return isinstance(node, WorkerLocal)


def is_over(axes: tuple[str, ...]) -> Callable[[Any], bool]:
    """A test for nodes over these axes; for `is_leaf`."""
    return lambda node: isinstance(node, WorkerLocal) and node.axes == axes


def is_own_array(node: Any) -> bool:
    """True of a `WorkerLocal` of a single array; for `is_leaf`."""
    return isinstance(node, WorkerLocal) and hasattr(node.value, "shape")


def worker_local_nodes(state: Any) -> list[WorkerLocal]:
    """All worker-local nodes of a state, outer ones before those inside them."""
    found: list[WorkerLocal] = []
    for node in jax.tree.leaves(state, is_leaf=is_worker_local):
        if isinstance(node, WorkerLocal):
            found += [node, *worker_local_nodes(node.value)]
    return found


def partitions(state: Any) -> Any:
    """The partition of each array of a state by its `WorkerLocal` nodes alone.

    Args:
      state: a state, or its shapes and dtypes.

    Returns:
      A tree of the state's structure: `PartitionSpec()` outside of such nodes.
    """

    def of(node: Any) -> Any:
        if not isinstance(node, WorkerLocal):
            return PartitionSpec()
        inside, treedef = jax.tree.flatten(node.value, is_leaf=is_worker_local)
        first = node.axes[0] if len(node.axes) == 1 else node.axes
        specs = node.specs or [PartitionSpec(first)] * len(inside)
        placed = [
            jax.tree.map(
                # The inner node's axis comes first.
                lambda inner, outer=spec: PartitionSpec(*inner, *outer),
                of(x),
                is_leaf=is_spec,
            )
            for x, spec in zip(inside, specs[: len(inside)], strict=True)
        ]
        return dataclasses.replace(node, value=treedef.unflatten(placed))

    return jax.tree.map(of, state, is_leaf=is_worker_local)


def types_by_path(state: Any) -> dict[str, Any]:
    """For each leaf's path its shape, and the dtype of one that is worker-local.

    Other leaves are Optax's, too, whose moments may have another dtype after the first
    step.
    """
    types = {}
    for path, node in jax.tree.leaves_with_path(state, is_leaf=is_worker_local):
        for below, x in jax.tree.leaves_with_path(node):
            type_ = f"{x.dtype}{x.shape}" if is_worker_local(node) else x.shape
            types[jax.tree_util.keystr((*path, *below))] = type_
    return types


def check_agreed(updates: Any, state: Any, axes: tuple[str, ...]) -> None:
    """Refuses what a step returns if it differs between workers and must not.

    Args:
      updates: what an optimizer's update returned inside `shard_map`.
      state: the state beside it.
      axes: the worker axes.

    Raises:
      ValueError: if a leaf outside `WorkerLocal` differs, by its type.
    """
    trees = {"update": updates, "optimizer's state": state}
    for what, tree in trees.items():
        leaves = jax.tree.leaves_with_path(tree, is_leaf=is_worker_local)
        for path, leaf in leaves:
            if not is_worker_local(leaf) and set(axes) & varying_axes(leaf):
                raise ValueError(
                    f"the {what} {jax.tree_util.keystr(path)} differs from worker to "
                    "worker, because gradients pass through no exchange before it: put "
                    f"the exchange, or onebit_jax.exact_mean({axes}) if there is none, "
                    "before the transformation that makes it, even before "
                    "optax.set_to_zero, and use onebit_jax.skip_nonfinite instead of "
                    "optax.zero_nans."
                )
