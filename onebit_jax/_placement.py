"""Placing an optimizer's state on a mesh."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from onebit_jax._exchange import ExactMeanState
from onebit_jax._per_worker import PerWorker, is_per_worker

_REPLACEMENTS = {
    optax.MultiStepsState: ("optax.MultiSteps", "onebit_jax.accumulate"),
    optax.ApplyIfFiniteState: ("optax.apply_if_finite", "onebit_jax.skip_nonfinite"),
}


def state_specs(state: Any) -> Any:
    """The partition of each leaf of an optimizer's state, for `jax.shard_map`.

    Args:
      state: a state, or its shapes and dtypes.

    Returns:
      A tree of the state's structure with a `PartitionSpec` for each leaf: the
      worker axes for the leading axis of worker-local arrays, no axis for others.

    Raises:
      ValueError: if an exchange stands inside a wrapper of Optax's that cannot hold
        one.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> state = onebit_jax.init(onebit_jax.sign_mean('data'), jnp.zeros(3), mesh)
      >>> state_specs(state).worker_error.value == jax.P('data')
      True
    """
    _check_wrappers(state)

    def specs(node: Any) -> Any:
        axes = node.axes if is_per_worker(node) else None
        spec = PartitionSpec() if axes is None else PartitionSpec(_compact(axes))
        return jax.tree.map(lambda _: spec, node)

    return jax.tree.map(specs, state, is_leaf=is_per_worker)


def abstract_state(
    tx: optax.GradientTransformation, params: Any, mesh: Mesh | AbstractMesh
) -> Any:
    """The shapes, dtypes and shardings of an optimizer's state on a mesh.

    Args:
      tx: the optimizer.
      params: parameters, or their shapes and dtypes.
      mesh: the mesh whose axes the optimizer's exchange names.

    Returns:
      A tree of `jax.ShapeDtypeStruct`, such as a checkpoint is restored to.

    Raises:
      ValueError: if the mesh lacks a worker axis, or as `state_specs`.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> state = abstract_state(onebit_jax.sign_mean('data'), jnp.zeros(3), mesh)
      >>> state.worker_error.value.shape
      (1, 3)
    """
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        state = jax.eval_shape(tx.init, shapes)

    def place(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        # What has no elements leaves every jitted function replicated.
        sharding = NamedSharding(mesh, spec if x.size else PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, state, state_specs(state))


def init(tx: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """Makes an optimizer's state, each worker its own part.

    Args:
      tx: the optimizer.
      params: parameters, the same on all workers.
      mesh: the mesh whose axes the optimizer's exchange names.

    Returns:
      The state as global arrays: worker-local ones have a leading worker axis that
      is sharded over the worker axes, all others are replicated.

    Raises:
      ValueError: if the mesh lacks a worker axis, or as `state_specs`.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> state = init(onebit_jax.sign_mean('data'), jnp.zeros(3), mesh)
      >>> state.worker_error.value
      Array([[0., 0., 0.]], dtype=float32)
    """
    abstract = abstract_state(tx, params, mesh)
    nodes = jax.tree.leaves(abstract, is_leaf=is_per_worker)
    axes = {axis for node in nodes if is_per_worker(node) for axis in node.axes}
    local_init = jax.shard_map(
        tx.init,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=state_specs(abstract),
        axis_names=axes or set(mesh.axis_names),
    )
    return jax.jit(local_init)(params)


def resize(
    state: Any, tx: optax.GradientTransformation, params: Any, mesh: Mesh
) -> Any:
    r"""Converts an optimizer's state to another number of workers.

    What is the same on all workers stays. The residual that the exchange owes is
    preserved: every new worker gets the mean :math:`\frac1n \sum_i \delta^{(i)}` of
    the worker errors, and the server errors are divided anew.

    Args:
      state: a state of any number of workers.
      tx: the optimizer.
      params: parameters, or their shapes and dtypes.
      mesh: the new mesh.

    Returns:
      The state on the new mesh; the same values if the number is the same.

    Raises:
      ValueError: if the state is not one of this optimizer's.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.sign_mean('data')
      >>> four = onebit_jax.SignMeanState(
      ...     onebit_jax.PerWorker(jnp.arange(4.0)[:, None], ('data',), 'each'),
      ...     onebit_jax.PerWorker(jnp.zeros((4, 0, 1024)), ('data',), 'split'),
      ... )
      >>> resize(four, tx, jnp.zeros(1), mesh).worker_error.value
      Array([[1.5]], dtype=float32)
    """
    made = abstract_state(tx, params, _mesh_of(state))
    if not _same_types(state, made):
        raise ValueError(
            "the state is not one of this optimizer's: resize it with the optimizer, "
            "its options and the parameters that it was made with."
        )
    target = abstract_state(tx, params, mesh)

    def convert(old: Any, new: Any) -> Any:
        if not is_per_worker(old):
            return jax.device_put(old, new.sharding)
        change = _spread if old.role == "each" else _divide
        return PerWorker(jax.tree.map(change, old.value, new.value), new.axes, new.role)

    return jax.tree.map(convert, state, target, is_leaf=is_per_worker)


def _mesh_of(state: Any) -> AbstractMesh:
    """A mesh of as many workers as a state was made for."""
    nodes = [x for x in jax.tree.leaves(state, is_leaf=is_per_worker)]
    nodes = [x for x in nodes if is_per_worker(x) and jax.tree.leaves(x)]
    sizes: dict[str, int] = {}
    # Only the product of several axes is known, which is all that matters.
    for node in sorted(nodes, key=lambda node: len(node.axes)):
        first, *others = [x for x in node.axes if x not in sizes] or [node.axes[0]]
        known = math.prod(sizes.get(x, 1) for x in node.axes if x != first)
        sizes[first] = jax.tree.leaves(node)[0].shape[0] // known
        sizes.update(dict.fromkeys(others, 1))
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _same_types(a: Any, b: Any) -> bool:
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)


def _spread(old: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
    if old.shape[0] == new.shape[0]:
        return jax.device_put(old, new.sharding)
    mean = jnp.mean(old.astype(jnp.float32), axis=0)
    if mean.shape != new.shape[1:]:  # padded to a multiple of the workers
        mean = _fit(mean, new.shape[-1])
    mean = jnp.broadcast_to(mean.astype(new.dtype), new.shape)
    return jax.device_put(mean, new.sharding)


def _divide(old: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
    flat = _fit(old.reshape(-1), new.size)
    return jax.device_put(flat.reshape(new.shape), new.sharding)


def _fit(flat: jax.Array, size: int) -> jax.Array:
    # Only padding is cut off, and only zeros are added.
    return jnp.pad(flat[:size], (0, max(0, size - flat.size)))


def _compact(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes


def _check_wrappers(state: Any) -> None:
    wrappers = tuple(_REPLACEMENTS)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, wrappers))
    for node in nodes:
        if isinstance(node, wrappers) and _has_exchange(node):
            wrapper, replacement = _REPLACEMENTS[type(node)]
            raise ValueError(
                f"{wrapper} cannot hold an exchange, because it takes what differs "
                f"from worker to worker for the same on all: use {replacement}."
            )


def _has_exchange(wrapper: Any) -> bool:
    marks = (PerWorker, ExactMeanState)
    nodes = jax.tree.leaves(wrapper, is_leaf=lambda node: isinstance(node, marks))
    return any(isinstance(node, marks) for node in nodes)
