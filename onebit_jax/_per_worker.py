"""State that differs from worker to worker, declared as such."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerWorker:
    """Arrays with a leading worker axis, each worker holding its own slice.

    Everything else in an optimizer's state is the same on all workers. This node
    tells a function which is which, wherever it stands inside `optax.chain`,
    `optax.masked` or `optax.inject_hyperparams`.

    Attributes:
      value: a tree of arrays of shape (workers, ...); (1, ...) inside `shard_map`.
      axes: the mesh axes whose members are the workers.
      role: what the slices mean when the number of workers changes. 'each': every
        worker holds its own share of a mean, which is preserved by giving every
        new worker the mean. 'split': the slices are consecutive parts of one
        buffer, which is divided anew. 'split_shards': the second axis is one of
        shards, each with a buffer of its own that is divided so.
      specs: the partition of each leaf; None for the leading axis over `axes` alone.
        Over other axes than the workers' it tells where a leaf is placed.

    Example:
      >>> import jax.numpy as jnp
      >>> error = PerWorker(jnp.zeros((8, 3)), axes=('data',), role='each')
      >>> jax.tree.map(jnp.shape, error).value
      (8, 3)
    """

    value: Any
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    role: Literal["each", "split", "split_shards"] = dataclasses.field(
        metadata={"static": True}
    )
    specs: tuple[PartitionSpec, ...] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

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


def is_per_worker(node: object) -> bool:
    """Whether a node of a state is a `PerWorker`; for `is_leaf`."""
    return isinstance(node, PerWorker)
