"""Placing an optimizer's state on a mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from onebit_jax._exchange import ExactMeanState
from onebit_jax._per_worker import PerWorker, is_per_worker
from onebit_jax._specs import is_spec, names_of

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
        if not is_per_worker(node):
            return PartitionSpec()
        partitions = jax.tree.map(
            lambda spec: _over(node.axes, spec), node.partitions(), is_leaf=is_spec
        )
        return dataclasses.replace(node, value=partitions)

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
    _check_wrappers(state)
    own = {
        path: (p.shape, p.sharding.spec)
        for path, p in jax.tree.leaves_with_path(params)
        if isinstance(getattr(p, "sharding", None), NamedSharding)
        and names_of(p.sharding.spec) <= set(mesh.axis_names)
    }

    def place(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        # What has no elements leaves every jitted function replicated.
        sharding = NamedSharding(mesh, spec if x.size else PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    nodes = jax.tree.leaves(state, is_leaf=is_per_worker)
    workers = {axis for node in nodes if is_per_worker(node) for axis in node.axes}

    def own_spec(path: Any, shape: tuple[int, ...]) -> PartitionSpec:
        # What is kept for a parameter is placed as it is: moments, averages.
        ends = (own[path[i:]] for i in range(len(path) + 1) if path[i:] in own)
        specs = (spec for like, spec in ends if like == shape)
        spec = next(specs, PartitionSpec())
        return PartitionSpec() if names_of(spec) & workers else spec

    def place_node(path: Any, node: Any) -> Any:
        if not is_per_worker(node):
            return place(node, own_spec(path, node.shape))

        def place_leaf(
            below: Any, x: jax.ShapeDtypeStruct, spec: PartitionSpec
        ) -> jax.ShapeDtypeStruct:
            if not node.specs:
                spec = PartitionSpec(*spec, *own_spec(below, x.shape[1:]))
            return place(x, spec)

        value = jax.tree.map_with_path(place_leaf, node.value, node.partitions())
        return dataclasses.replace(node, value=value)

    return jax.tree.map_with_path(place_node, state, is_leaf=is_per_worker)


def init(tx: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """Makes an optimizer's state, each worker its own part.

    Args:
      tx: the optimizer.
      params: parameters, the same on all workers.
      mesh: the mesh whose axes the optimizer's exchange names.

    Returns:
      The state as global arrays: worker-local ones have a leading worker axis that
      is sharded over the worker axes; what is kept for a parameter is sharded as the
      parameter is over other axes; all others are replicated.

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
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(local_init, out_shardings=shardings)(params)


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
      The state on the new mesh; the same values if the number is the same. It may
      share arrays with the old one, which is not to be used, or donated, again.

    Raises:
      ValueError: if the state is not one of this optimizer's.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.sign_mean('data')
      >>> four = onebit_jax.SignMeanState(
      ...     onebit_jax.PerWorker(jnp.arange(4.0)[:, None], ('data',), 'each'),
      ...     onebit_jax.PerWorker(jnp.zeros((4, 1, 1024)), ('data',), 'split'),
      ... )
      >>> resize(four, tx, jnp.zeros(1), mesh).worker_error.value
      Array([[1.5]], dtype=float32)
    """
    meshes = _meshes_of(state)
    if not any(_same_types(state, abstract_state(tx, params, old)) for old in meshes):
        raise ValueError(
            "the state is not one of this optimizer's: resize it with the optimizer, "
            "its options and the parameters that it was made with."
        )
    target = abstract_state(tx, params, mesh)

    def convert(old: Any, new: Any) -> Any:
        if not is_per_worker(old):
            return jax.device_put(old, new.sharding)
        change = {"each": _spread, "split": _divide, "split_shards": _divide_shards}
        value = jax.tree.map(change[old.role], old.value, new.value)
        return dataclasses.replace(new, value=value)

    return jax.tree.map(convert, state, target, is_leaf=is_per_worker)


def _meshes_of(state: Any) -> list[AbstractMesh]:
    """The meshes that a state may have been made for, as far as it tells."""
    nodes = [x for x in jax.tree.leaves(state, is_leaf=is_per_worker)]
    nodes = [x for x in nodes if is_per_worker(x) and jax.tree.leaves(x)]
    sizes: dict[str, int] = {}
    candidates = [1]
    inside: dict[str, int] = {}
    # Only the product of several axes is known, which is all that matters.
    for node in sorted(nodes, key=lambda node: len(node.leading_axes())):
        leading = node.leading_axes()
        first, *others = [x for x in leading if x not in sizes] or [leading[0]]
        known = math.prod(sizes.get(x, 1) for x in leading if x != first)
        shape = jax.tree.leaves(node)[0].shape
        sizes[first] = shape[0] // known
        sizes.update(dict.fromkeys(others, 1))
        further = {name for spec in node.specs or () for name in names_of(spec)}
        inside = dict.fromkeys(sorted(further - set(leading)), 1) | inside
        if node.specs and node.role != "split_shards" and set(node.axes) - set(leading):
            # Each host's part is divided by as many devices as divide it.
            blocks = shape[-2]
            candidates = [n for n in range(1, blocks + 1) if blocks % n == 0]
            placed = getattr(jax.tree.leaves(node)[0], "sharding", None)
            if isinstance(placed, NamedSharding) and placed.spec == node.specs[0]:
                names = set(node.axes) - set(leading)
                candidates = [math.prod(placed.mesh.shape[name] for name in names)]
    first_inside = next((name for name in inside if name not in sizes), None)
    meshes = []
    for number in candidates:
        whole = inside | sizes
        if first_inside is not None:
            whole[first_inside] = number
        meshes.append(AbstractMesh(tuple(whole.values()), tuple(whole)))
    return meshes


def _same_types(a: Any, b: Any) -> bool:
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False

    def same(x: Any, y: Any) -> bool:
        pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
        # How parameters were sharded, the state does not tell.
        shards = is_per_worker(x) and x.role == "split_shards"
        return all(
            u.dtype == v.dtype
            and (u.shape[-1:] == v.shape[-1:] if shards else u.shape == v.shape)
            for u, v in pairs
        )

    return jax.tree.all(jax.tree.map(same, a, b, is_leaf=is_per_worker))


def _spread(old: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
    if old.shape == new.shape:
        return jax.device_put(old, new.sharding)
    if old.shape[0] != new.shape[0]:
        old = jnp.mean(old.astype(jnp.float32), axis=0, keepdims=True)
    rows = old.reshape(old.shape[0], -1).astype(new.dtype)
    # Padded to a multiple of the workers, or of what they have of it.
    rows = _fit(rows, math.prod(new.shape[1:])).reshape(len(rows), *new.shape[1:])
    return jax.device_put(jnp.broadcast_to(rows, new.shape), new.sharding)


def _divide(old: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
    flat = _fit(old.reshape(1, -1), new.size)
    return jax.device_put(flat.reshape(new.shape), new.sharding)


def _divide_shards(old: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
    shards = new.shape[1]
    if old.shape[1] != shards:
        raise ValueError(
            f"the state's parameters are divided into {old.shape[1]} shards and the "
            f"mesh divides them into {shards}: resize changes the number of workers "
            "alone, so keep the other axes as they are."
        )
    flat = _fit(jnp.swapaxes(old, 0, 1).reshape(shards, -1), new.size // shards)
    divided = flat.reshape(shards, new.shape[0], *new.shape[2:])
    return jax.device_put(jnp.swapaxes(divided, 0, 1), new.sharding)


def _fit(rows: jax.Array, size: int) -> jax.Array:
    # Only padding is cut off, and only zeros are added.
    rows = rows[:, :size]
    return jnp.pad(rows, ((0, 0), (0, size - rows.shape[1])))


def _over(axes: tuple[str, ...], spec: PartitionSpec) -> PartitionSpec:
    """What of a partition is over the workers; `shard_map` leaves the rest alone."""
    kept = [
        entry if names_of(PartitionSpec(entry)) <= set(axes) else None for entry in spec
    ]
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


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
