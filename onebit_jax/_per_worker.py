"""State that differs from worker to worker, declared as such."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerWorker:
    """Arrays with a leading worker axis, each worker holding its own slice.

    Everything else in an optimizer's state is the same on all workers. This node
    tells a function which is which, wherever it stands inside `optax.chain`,
    `optax.masked` or `optax.inject_hyperparams`.

    Attributes:
      value: a tree of arrays of shape (workers, ...); (1, ...) inside `shard_map`.
      axes: the mesh axes that the leading axis is sharded over.
      role: what the slices mean when the number of workers changes. 'each': every
        worker holds its own share of a mean, which is preserved by giving every
        new worker the mean. 'split': the slices are consecutive parts of one
        buffer, which is divided anew.

    Example:
      >>> import jax.numpy as jnp
      >>> error = PerWorker(jnp.zeros((8, 3)), axes=('data',), role='each')
      >>> jax.tree.map(jnp.shape, error).value
      (8, 3)
    """

    value: Any
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    role: Literal["each", "split"] = dataclasses.field(metadata={"static": True})


def is_per_worker(node: object) -> bool:
    """Whether a node of a state is a `PerWorker`; for `is_leaf`."""
    return isinstance(node, PerWorker)
