"""State that differs from worker to worker, declared as such."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from onebit_jax.workers.axes import varying_axes

Resizing = Literal["average", "concatenate", "drop"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkerLocal:
    """Arrays with a leading worker axis, each worker holding its own slice.

    Everything else in an optimizer's state is the same on all workers. This node
    tells a function which is which, wherever it stands inside `optax.chain`,
    `optax.masked` or `optax.inject_hyperparams`.

    Attributes:
      value: a tree of arrays of shape (workers, ...); (1, ...) inside `shard_map`.
      axes: the mesh axes whose members are the workers.
      resizing: the meaning of the slices when the number of workers changes.
        'average': each worker holds its own share of a mean, which is preserved by
        giving every new worker the mean. 'concatenate': the slices are consecutive
        parts of one buffer, which is divided anew. 'drop': zeros take their place.
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

    def partitions(self) -> Any:
        """The partition of each leaf, in the structure of the value."""
        leaves, treedef = jax.tree.flatten(self.value)
        first = self.axes[0] if len(self.axes) == 1 else self.axes
        specs = self.specs or [PartitionSpec(first)] * len(leaves)
        return treedef.unflatten(specs[: len(leaves)])

    def leading_axes(self) -> tuple[str, ...]:
        """The mesh axes that the leading axis is sharded over."""
        if not self.specs:
            return self.axes
        first = self.specs[0][0]
        return (first,) if isinstance(first, str) else tuple(first)


def is_worker_local(node: object) -> bool:
    """True of a node that is a `WorkerLocal`; for `is_leaf`."""
    return isinstance(node, WorkerLocal)


def worker_local_nodes(state: Any) -> list[WorkerLocal]:
    """All worker-local nodes of a state."""
    nodes = jax.tree.leaves(state, is_leaf=is_worker_local)
    return [node for node in nodes if is_worker_local(node)]


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


def add_own(params: Any, own: WorkerLocal) -> Any:
    """Agreed parameters plus what each worker's differ by.

    Args:
      params: the same on all workers.
      own: for each leaf `(workers, *shape)`, of which the mean over the first axis is
        added. Inside `shard_map` that axis has length 1: what is added is the worker's
        own. Leaves that `optax.masked` leaves out stay.

    Returns:
      A tree like the parameters.
    """

    def add(x: Any, p: Any) -> Any:
        if isinstance(x, optax.MaskedNode):
            return p
        dtype = p.dtype if jnp.finfo(p.dtype).bits > 32 else jnp.float32
        own = jnp.mean(x, axis=0)
        return (p.astype(dtype) + own.astype(dtype)).astype(p.dtype)

    return jax.tree.map(
        add, own.value, params, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )


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
