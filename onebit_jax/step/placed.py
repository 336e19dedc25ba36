"""Where the trees that a step of one's own carries lie on its mesh."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from onebit_jax.step.checks import check_workers_of
from onebit_jax.step.data_parallel import copied, spec_inside, specs_told
from onebit_jax.workers.placement import state_specs
from onebit_jax.workers.specs import names_of, sharding_of
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
