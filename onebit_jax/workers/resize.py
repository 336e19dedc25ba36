"""Converting an optimizer's state to another number of workers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from onebit_jax.workers.placement import abstract_state, check_shards
from onebit_jax.workers.worker_local import (
    Resizing,
    WorkerLocal,
    is_worker_local,
    types_by_path,
)


def resize(
    state: Any,
    tx: optax.GradientTransformation,
    params: Any,
    old_mesh: Mesh | AbstractMesh,
    mesh: Mesh,
) -> Any:
    r"""Converts an optimizer's state to another number of workers.

    What is the same on all workers stays. Worker-local state says itself what becomes
    of it (`WorkerLocal.resizing`). Of an exchange with error feedback the residual is
    preserved: every new worker gets the mean :math:`\frac1n \sum_i \delta^{(i)}` of
    the worker errors, and the server errors are divided anew.

    Args:
      state: a state of any number of workers.
      tx: the optimizer.
      params: parameters, or their shapes and dtypes.
      old_mesh: the mesh that the state was made for, or its shape as an
        `AbstractMesh`; it need not be the one that the state is placed on.
      mesh: the new mesh.

    Returns:
      The state on the new mesh; the same values if the number is the same. It may
      share arrays with the old one, which is not to be used, or donated, again.

    Raises:
      ValueError: if the state is not one of this optimizer's on the old mesh, or a mesh
        lacks a worker axis. Also if the parameters are sharded differently inside the
        workers of the new one.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> from jax.sharding import AbstractMesh
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.accumulate(onebit_jax.exact_mean('data'), 2, 'data')
      >>> state = onebit_jax.init(tx, jnp.zeros(1), mesh)
      >>> four = jax.tree.map(
      ...     lambda x: jnp.arange(4.0)[:, None] if x.ndim else x, state)
      >>> old_mesh = AbstractMesh((4,), ('data',))
      >>> resize(four, tx, jnp.zeros(1), old_mesh, mesh).own.inner.value
      Array([[1.5]], dtype=float32)
    """
    if not _is_made_like(state, abstract_state(tx, params, old_mesh)):
        raise ValueError(
            "the state is not one of this optimizer's on the old mesh, "
            f"{dict(old_mesh.shape)}: pass the mesh that it was made on, and its "
            "optimizer with the same options, exchange and parameters."
        )
    check_shards(state, old_mesh, mesh)
    target = abstract_state(tx, params, mesh)

    def convert(old: Any, new: Any, around: tuple[WorkerLocal, ...] = ()) -> Any:
        if not is_worker_local(old):
            return _converted(old, new, around)
        value = jax.tree.map(
            lambda x, like: convert(x, like, (old, *around)),
            old.value,
            new.value,
            is_leaf=is_worker_local,
        )
        return dataclasses.replace(new, value=value)

    return jax.tree.map(convert, state, target, is_leaf=is_worker_local)


def _converted(
    old: jax.Array, new: jax.ShapeDtypeStruct, nodes: tuple[WorkerLocal, ...]
) -> jax.Array:
    """An array of the state, whose first axes are those of the nodes around it."""
    if old.shape == new.shape:
        return jax.device_put(old, new.sharding)
    old = _automatic(old)
    with _mesh_of(old):
        for axis, node in enumerate(nodes):
            # All other axes of workers number shards, which are resized one by one.
            others = len(nodes) - 1 + node.shard_axes
            x = jnp.moveaxis(old, axis, 0)
            around, inside = x.shape[1 : len(nodes)], new.shape[len(nodes) :]
            shape = (new.shape[axis], *around, *inside)
            old = jnp.moveaxis(_resized(x, shape, node.resizing, others), 0, axis)
        old = old if old.dtype == new.dtype else old.astype(new.dtype)
    return jax.device_put(old, new.sharding)


def _resized(
    old: jax.Array, shape: tuple[int, ...], resizing: Resizing, others: int
) -> jax.Array:
    """An array whose first axis is that of the workers, the next ones of shards."""
    if old.shape == shape:
        return old
    if resizing == "drop":
        return jnp.zeros(shape, old.dtype)
    if resizing == "first":
        return jnp.broadcast_to(old[:1], shape)
    # A row for each shard: what its workers hold, one after another.
    number = math.prod(old.shape[1 : 1 + others])
    rows = jnp.moveaxis(old.reshape(old.shape[0], number, -1), 1, 0)
    if resizing == "average":
        if old.shape[0] != shape[0]:
            wide = jnp.promote_types(old.dtype, jnp.float32)
            rows = jnp.mean(rows.astype(wide), axis=1, keepdims=True)
        size = math.prod(shape[1:]) // number
        rows = jnp.broadcast_to(_fit(rows, size), (number, shape[0], size))
    else:
        rows = _fit(rows.reshape(number, 1, -1), math.prod(shape) // number)
    return jnp.moveaxis(rows.reshape(number, shape[0], -1), 1, 0).reshape(shape)


def _automatic(x: jax.Array) -> jax.Array:
    """The array where it is, on automatic axes: explicit ones allow few reshapes."""
    # In a program that is traced the values have no place yet.
    if isinstance(x, Tracer):
        return x
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return x
    mesh: Any = sharding.mesh  # of devices, as the array is placed
    automatic = Mesh(mesh.devices, mesh.axis_names)
    return jax.device_put(x, NamedSharding(automatic, sharding.spec))


def _mesh_of(x: jax.Array) -> contextlib.AbstractContextManager[Any]:
    """The context in which it is computed with, whatever mesh the caller has set."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh
        return jax.set_mesh(mesh)
    return contextlib.nullcontext()


def _fit(rows: jax.Array, size: int) -> jax.Array:
    # Only padding is cut off, and only zeros are added.
    rows = rows[..., :size]
    return jnp.pad(rows, [(0, 0), (0, 0), (0, size - rows.shape[-1])])


def _is_made_like(state: Any, made: Any) -> bool:
    if jax.tree.structure(state) != jax.tree.structure(made):
        return False
    return types_by_path(state) == types_by_path(made)
