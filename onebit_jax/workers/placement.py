"""Placing an optimizer's state on a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from onebit_jax.workers.axes import is_variable, not_bound
from onebit_jax.workers.chains import check_wrappers
from onebit_jax.workers.processes import check_same, processes_of
from onebit_jax.workers.specs import (
    context_of,
    explicit,
    is_spec,
    names_of,
    over,
    sharding_of,
    spec_of,
)
from onebit_jax.workers.worker_local import (
    WorkerLocal,
    is_worker_local,
    partitions,
    worker_local_nodes,
)

_NOT_TRAINED = {"BatchStat", "RngState"}
"""Classes of Flax NNX, by name, as this package does not import Flax."""


def state_specs(state: Any) -> Any:
    """The partition of each leaf of an optimizer's state, for `jax.shard_map`.

    Args:
      state: a state, or its shapes and dtypes.

    Returns:
      A tree of the state's structure with a `PartitionSpec` for each leaf: the
      worker axes for the leading axis of worker-local arrays, no axis for others.

    Raises:
      ValueError: if an exchange stands inside a wrapper of Optax's that cannot hold
        one, or after `accumulate` or `skip_nonfinite`, which should hold it. Also if
        something follows an optimizer whose workers take steps of their own, or
        `optax.contrib.schedule_free` is around it.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> state = onebit_jax.init(onebit_jax.sign_mean('data'), jnp.zeros(3), mesh)
      >>> state_specs(state).server_error.value == jax.P('data')
      True
    """
    check_wrappers(state)

    axes = {name for node in worker_local_nodes(state) for name in node.axes}
    return jax.tree.map(
        lambda spec: over(axes, spec), partitions(state), is_leaf=is_spec
    )


def abstract_state(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh | AbstractMesh,
    *,
    saved_on: Mesh | AbstractMesh | None = None,
) -> Any:
    """The shapes, dtypes and shardings of an optimizer's state on a mesh.

    A checkpoint is restored to these, by Orbax for example. One that was saved on
    another mesh is restored to the shapes that it has, on the devices of this one, and
    then converted: `resize(state, tx, params, saved_on, mesh)`. Worker-local arrays,
    which together may be too large for a device, are divided over all where a dimension
    can be.

    Args:
      tx: the optimizer.
      params: parameters, or their shapes and dtypes.
      mesh: the mesh whose axes the optimizer's exchange names.
      saved_on: the mesh that the state was saved on, or its shape as an `AbstractMesh`,
        as its devices need not be there; None for the same.

    Returns:
      A tree of `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: if a mesh lacks a worker axis, parameters are sharded differently
        inside the workers of the two, or as `state_specs`.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.sign_mean('data', exact_below=0)
      >>> state = abstract_state(tx, jnp.zeros(20_000), mesh)
      >>> state.worker_error.value.shape
      (1, 20000)
      >>> before = jax.sharding.AbstractMesh((8,), ('data',))
      >>> state = abstract_state(tx, jnp.zeros(20_000), mesh, saved_on=before)
      >>> state.worker_error.value.shape
      (8, 20000)
    """
    if saved_on is not None:
        here = abstract_state(tx, params, mesh)
        there = abstract_state(tx, params, saved_on)
        check_shards(there, saved_on, mesh)
        return jax.tree.map(functools.partial(_saved, mesh), there, here)
    # Over explicit axes the types tell the exchange how parameters are sharded.
    typed = explicit(mesh) if _is_sharded(params, mesh) else mesh.abstract_mesh
    shapes = jax.tree.map(lambda p: _shape_on(typed, p), params)
    with context_of(typed):
        state = jax.eval_shape(tx.init, shapes)
        for node in worker_local_nodes(state):
            if not set(node.axes) <= set(mesh.axis_names):
                raise not_bound(node.axes)
    check_wrappers(state)
    placed = {
        path: (p.shape, p.sharding.spec)
        for path, p in jax.tree.leaves_with_path(params)
        if isinstance(getattr(p, "sharding", None), NamedSharding)
        and names_of(p.sharding.spec) <= set(mesh.axis_names)
    }

    def place(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        # jax.jit returns empty arrays replicated, whatever sharding is asked for.
        sharding = sharding_of(mesh, spec if x.size else PartitionSpec(), len(x.shape))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    workers = {axis for node in worker_local_nodes(state) for axis in node.axes}
    own_spec = functools.partial(_spec_of_parameter, placed, workers)

    def place_node(path: Any, node: Any, spec: Any) -> Any:
        if isinstance(node, WorkerLocal):
            value = jax.tree.map_with_path(
                lambda below, x, inside: place_node((*path, *below), x, inside),
                node.value,
                spec.value,
                is_leaf=is_worker_local,
            )
            return dataclasses.replace(node, value=value)
        # A worker's own array for a parameter is placed as that, after its own axes.
        if names_of(spec) <= workers:
            spec = PartitionSpec(*spec, *own_spec(path, node.shape[len(spec) :]))
        return place(node, spec)

    return jax.tree.map_with_path(
        place_node, state, partitions(state), is_leaf=is_worker_local
    )


def check_shards(
    state: Any, old_mesh: Mesh | AbstractMesh, mesh: Mesh | AbstractMesh
) -> None:
    """Refuses shards that are cut differently, even where there are as many.

    Args:
      state: a state, or its shapes and dtypes, that was made for the old mesh.
      old_mesh: that.
      mesh: the one that it is to go on with.

    Raises:
      ValueError: if workers of the two are divided differently.
    """
    for node in worker_local_nodes(state):
        names = {name for spec in node.specs or () for name in names_of(spec)}
        names -= set(node.leading_axes())
        before, after = (
            {name: each.shape[name] for name in sorted(names)}
            for each in (old_mesh, mesh)
        )
        if node.shard_axes and before != after:
            raise ValueError(
                f"the state is divided into shards over {before} and the mesh divides "
                f"it over {after}: resize changes the number of workers, or of hosts, "
                "so keep the other axes as they are, or restore the parameters alone "
                "and begin the state anew, by onebit_jax.init(tx, params, mesh), "
                "without moments, errors and what workers have moved by themselves."
            )


def _is_sharded(params: Any, mesh: Mesh | AbstractMesh) -> bool:
    return any(
        names_of(spec_of(p)) & set(mesh.axis_names) for p in jax.tree.leaves(params)
    )


def _shape_on(mesh: AbstractMesh, p: Any) -> jax.ShapeDtypeStruct:
    if not names_of(spec_of(p)) <= set(mesh.axis_names) or not mesh.explicit_axes:
        return jax.ShapeDtypeStruct(p.shape, p.dtype)
    sharding = NamedSharding(mesh, spec_of(p))
    return jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding)


def _saved(
    mesh: Any, there: jax.ShapeDtypeStruct, here: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct:
    """The shape that an array was saved with, placed here."""
    # A step that is given arrays where it returns them is compiled once.
    if there.shape == here.shape:
        return here
    axes = [i for i, n in enumerate(there.shape) if i and n and n % mesh.size == 0]
    spec = (
        PartitionSpec(*[None] * axes[0], mesh.axis_names) if axes else PartitionSpec()
    )
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(there.shape, there.dtype, sharding=sharding)


def _spec_of_parameter(
    placed: dict[Any, tuple[tuple[int, ...], PartitionSpec]],
    workers: set[str],
    path: Any,
    shape: tuple[int, ...],
) -> PartitionSpec:
    """The partition of the parameter that an array of the state is a moment of.

    The array's path ends with the parameter's, and it has its shape.
    """
    ends = (path[i:] for i in range(len(path) + 1))
    matches = (placed[end] for end in ends if end in placed)
    specs = (spec for like, spec in matches if like == shape)
    spec = next(specs, PartitionSpec())
    return PartitionSpec() if names_of(spec) & workers else spec


def init(tx: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """Makes an optimizer's state, each worker its own part.

    Args:
      tx: the optimizer.
      params: parameters, the same on all workers.
      mesh: the mesh whose axes the optimizer's exchange names.

    Returns:
      The state as global arrays. Worker-local ones have a leading worker axis that is
      sharded over the worker axes. What is kept for a parameter is sharded as the
      parameter is over other axes. All others are replicated.

    Raises:
      ValueError: if the mesh lacks a worker axis, a variable of Flax NNX is at two
        places of the parameters, processes hold other parameters, or as `state_specs`.
      TypeError: if a random key or running statistics of Flax NNX are among the
        parameters.

    Warns:
      UserWarning: if this process was started as one of several and has not joined the
        others.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> state = init(onebit_jax.sign_mean('data'), jnp.zeros(3), mesh)
      >>> state.server_error.value.shape
      (1, 1, 1024)
    """
    check_params(params)
    check_same({"params": params}, processes_of(mesh))
    abstract = abstract_state(tx, params, mesh)
    _warn_of_separate_processes()
    axes = {axis for node in worker_local_nodes(abstract) for axis in node.axes}
    make = tx.init
    automatic = set(mesh.abstract_mesh.auto_axes) - axes
    if axes and automatic and _is_sharded(params, mesh):
        specs = jax.tree.map(spec_of, params)
        make = jax.sharding.explicit_axes(
            lambda p: tx.init(p), axes=tuple(automatic), in_sharding=(specs,)
        )
    local_init = jax.shard_map(
        make,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=state_specs(abstract),
        axis_names=axes or set(mesh.axis_names),
    )
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    # Arrays of another mesh than the one that is set cannot be made.
    here = jax.sharding.get_abstract_mesh()
    is_other = not here.empty and here != mesh.abstract_mesh
    with jax.set_mesh(mesh) if is_other else contextlib.nullcontext():
        return jax.jit(local_init, out_shardings=shardings)(params)


def _warn_of_separate_processes() -> None:
    """Warns a process that was started as one of several and has not joined them."""
    # Of launchers, of Open MPI, and of a step of Slurm.
    names = "JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"
    for name in names:
        started = os.environ.get(name, "")
        if started.isdecimal() and int(started) > jax.process_count() == 1:
            warnings.warn(
                f"this process is one of {started} ({name}), each of which trains a "
                "model of its own: call jax.distributed.initialize() before anything "
                "looks at a device.",
                stacklevel=3,
            )
            return


def check_params(params: Any) -> None:
    """Refuses random keys, Flax NNX's other state, and a variable at two places."""
    places: dict[int, str] = {}
    for path, node in jax.tree.leaves_with_path(params, is_leaf=is_variable):
        place = jax.tree_util.keystr(path) or "itself"
        kinds = {kind.__name__ for kind in type(node).__mro__}
        if not (is_variable(node) or hasattr(node, "dtype") or np.isscalar(node)):
            raise TypeError(
                f"the parameters' leaf {place} is no array but {node!r}: give the "
                "arrays alone, as params, rest = eqx.partition(model, "
                "eqx.is_inexact_array) of Equinox does, and put the model together in "
                "the loss."
            )
        is_key = jnp.issubdtype(getattr(node, "dtype", float), jax.dtypes.prng_key)
        if is_key or kinds & _NOT_TRAINED:
            kind = "a random key" if is_key else f"Flax's {type(node).__name__}"
            more = (
                "return what it becomes beside the loss (has_aux=True)"
                if "BatchStat" in kinds
                else "have the loss fold each worker's number into the key, "
                "jax.random.fold_in(key, jax.lax.axis_index(axis)), or all workers "
                "draw the same"
            )
            raise TypeError(
                f"the parameters' leaf {place} is {kind}, which must not be trained: "
                "leave it out, as nnx.split(model, nnx.Param, ...) does, pass it to "
                f"run.step beside the batch, and {more}."
            )
        if is_variable(node) and places.setdefault(id(node), place) != place:
            raise ValueError(
                f"the parameters' leaves {places[id(node)]} and {place} are one "
                "variable, and would be trained apart: split the model by graph, "
                "params, rest = nnx.split(model, nnx.Param, ...), which keeps it once, "
                "and merge it in the loss."
            )
