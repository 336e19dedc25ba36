"""Where the trees that a step carries lie on its mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from onebit_jax.step.checks import check_workers_of
from onebit_jax.workers.placement import state_specs
from onebit_jax.workers.specs import (
    LeafSpecs,
    entry_names,
    is_spec,
    names_of,
    sharding_of,
    spec_of,
)
from onebit_jax.workers.worker_local import (
    is_worker_local,
    partitions,
    worker_local_nodes,
)

_Partitions = dict[str, tuple[tuple[int, ...], PartitionSpec]]


def on_mesh(carried: Any, mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """The carried trees under the shardings that the step returns.

    It would be compiled anew for others. What comes from elsewhere, as NumPy's arrays
    of a checkpoint do, is sharded inside a worker as the exchanges' states tell.

    Args:
      carried: the trees.
      mesh: the mesh.
      axes: of the workers.

    Raises:
      ValueError: if a leaf is sharded over the workers' axes or those of another mesh,
        or the state is one of another number of workers, or of parameters that are
        not sharded where these are.
    """
    check_workers_of(carried, mesh.shape)
    for path, node in jax.tree.leaves_with_path(carried, is_leaf=is_worker_local):
        if not is_worker_local(node) and not isinstance(node, Tracer):
            spec_inside(mesh, axes, path[1:], node)
    parameters = _parameters(carried)
    _check_state_of_sharded(carried, mesh, parameters)

    def put(path: Any, x: Any, of_workers: PartitionSpec, told: PartitionSpec) -> Any:
        if isinstance(x, Tracer | jax.ShapeDtypeStruct) or _is_deleted(x):
            return x
        if names_of(told) <= set(axes):
            inside = _inside(parameters, path, np.shape(x)[len(told) :])
            told = PartitionSpec(*told, *inside)
        sharding = getattr(x, "sharding", None)
        if sharding is None or isinstance(sharding, SingleDeviceSharding):
            return copied(x, sharding_of(mesh, told, np.ndim(x)))
        if not isinstance(sharding, NamedSharding):
            return x
        here = sharding.spec
        if sharding.mesh != mesh and not names_of(of_workers):
            here = spec_inside(mesh, axes, path[1:], x)
        # Workers' own arrays come undivided, by tx.init in jax.set_mesh.
        if not names_of(of_workers) <= names_of(here):
            here = PartitionSpec(*of_workers, *here[len(of_workers) :])
        if not names_of(told) <= names_of(here):
            here = told
        at = sharding_of(mesh, here, x.ndim).with_memory_kind(sharding.memory_kind)
        # The same buffers, under the sharding that the step returns.
        return x if at == sharding else jax.device_put(x, at)

    return jax.tree.map_with_path(
        put, carried, state_specs(carried), partitions(carried)
    )


def placed_on(mesh: Mesh, x: Any) -> NamedSharding | None:
    """The sharding of an array that is on a mesh."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding
    return None


def _is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.is_deleted()


def _parameters(carried: Any) -> _Partitions:
    """By its path, the shape of each parameter of which a state tells the partition."""
    told, found = specs_told(carried), {}
    for path, x in jax.tree.leaves_with_path(carried, is_leaf=is_worker_local):
        if not is_worker_local(x):
            for name in _ends(path):
                if name in told:
                    # The parameters stand before what is kept for them.
                    found.setdefault(name, (np.shape(x), told[name]))
                    break
    return found


def _inside(
    parameters: _Partitions, path: Any, shape: tuple[int, ...]
) -> PartitionSpec:
    """The partition of the parameter that an array is, or is kept for."""
    for name in _ends(path):
        if name in parameters and parameters[name][0] == shape:
            return parameters[name][1]
    return PartitionSpec()


def _ends(path: Any) -> list[str]:
    return [jax.tree_util.keystr(path[i:]) for i in range(len(path) + 1)]


def _check_state_of_sharded(carried: Any, mesh: Mesh, parameters: _Partitions) -> None:
    """Refuses a state that was made before the parameters were sharded."""
    if not worker_local_nodes(carried) or any(
        names_of(spec) for _, spec in parameters.values()
    ):
        return
    arrays = [
        (path, x)
        for path, x in jax.tree.leaves_with_path(carried)
        if placed_on(mesh, x) is not None
    ]
    ends = {
        (end, x.shape)
        for path, x in arrays
        if not names_of(x.sharding.spec)
        # Of the path below params, or below a TrainState's params.
        for end in _ends(path)
    }
    for path, x in arrays:
        for end in (jax.tree_util.keystr(path[i:]) for i in (1, 2) if len(path) > i):
            if names_of(x.sharding.spec) and (end, x.shape) in ends:
                names = tuple(sorted(names_of(x.sharding.spec)))
                raise ValueError(
                    f"the parameters' leaf {end} is sharded over {names}, "
                    "and the optimizer's state was made for parameters that are not: "
                    "make it from these, as state = onebit_jax.init(tx, params, mesh)."
                )


def copied(x: Any, sharding: NamedSharding) -> Any:
    """A copy on the mesh: a step donates its arguments, and the caller keeps them."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=sharding)(x)
    if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
        return jax.device_put(jax.random.clone(x), sharding)
    # From the host, as a process's own array may be known to no other process.
    x = np.asarray(x)
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    # jax.device_put would gather the arrays of all processes, to compare them again.
    return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])


def spec_inside(mesh: Mesh, axes: tuple[str, ...], path: Any, p: Any) -> PartitionSpec:
    """The partition of a parameter inside a worker."""
    # An array of one device may be of any mesh.
    if getattr(p, "is_fully_replicated", True):
        return PartitionSpec()
    spec, name = spec_of(p), jax.tree_util.keystr(path) or "itself"
    if not isinstance(p.sharding, NamedSharding) or not names_of(spec) <= set(
        mesh.axis_names
    ):
        raise ValueError(
            f"the parameters' leaf {name} is sharded by {p.sharding}, which is not "
            "over axes of this mesh: put it there, by jax.device_put(params, "
            "NamedSharding(mesh, spec))."
        )
    if shared := sorted(names_of(spec) & set(axes)):
        raise ValueError(
            f"the parameters' leaf {name} is sharded over {tuple(shared)}, whose "
            "members are the workers, each of which needs all parameters: name the "
            "axis that is to be compressed alone, as axis='replica' of a mesh of "
            "('replica', 'data'), or replicate them."
        )
    return spec


def specs_inside(params: Any, state: Any) -> Any:
    """The partitions of parameters inside a worker, told by the exchanges' states."""
    told = specs_told(state)
    return jax.tree.map_with_path(
        lambda path, _: told.get(jax.tree_util.keystr(path), PartitionSpec()), params
    )


def specs_told(state: Any) -> dict[str, PartitionSpec]:
    """The partitions that exchanges' states tell, by the paths of parameters."""
    return {
        place: spec
        for node in jax.tree.leaves(state, is_leaf=_is_told)
        if _is_told(node)
        for place, spec in zip(node.places, node.specs, strict=True)
    }


def _is_told(node: Any) -> bool:
    return isinstance(node, LeafSpecs)


def check_sharded(params: Any, specs: Any, state: Any) -> None:
    """Refuses exchanges that do not see how the parameters are sharded."""
    has_whole = any(
        node.resizing == "concatenate"
        and not (node.shard_axes and node.leading_axes() == node.axes)
        for node in worker_local_nodes(state)
    )
    given = jax.tree.leaves(specs, is_leaf=is_spec)
    told = jax.tree.leaves(specs_inside(params, state), is_leaf=is_spec)
    sharded = any(map(names_of, given))
    same = all(
        [*map(entry_names, a)][: len(b)] == [*map(entry_names, b)][: len(a)]
        and names_of(a) == names_of(b)
        for a, b in zip(given, told, strict=True)
    )
    if not same or (sharded and has_whole):
        raise ValueError(
            "parameters are sharded inside each worker, and an exchange does not see "
            "how, or there is none: the optimizer needs an exchange between workers, "
            "given the parameters' own tree, not inside optax.flatten or hierarchical, "
            "and a per_shard(exchange, specs) the specs by which the parameters are "
            "sharded."
        )
