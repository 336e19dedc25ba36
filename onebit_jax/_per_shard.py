"""An exchange between workers whose parameters are sharded inside each worker."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec

from onebit_jax import _axes
from onebit_jax._compressed import SignMeanState, check_floats, divide
from onebit_jax._exchange import Exchange
from onebit_jax._per_worker import PerWorker
from onebit_jax._specs import entry_names, is_spec, names_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array


class _Group(NamedTuple):
    """Leaves that are sharded over the same mesh axes, in any of their dimensions."""

    names: tuple[str, ...]
    leaves: tuple[int, ...]


def per_shard(exchange: Exchange, specs: Any) -> Exchange:
    r"""Exchanges each shard of the parameters by itself, over the workers alone.

    For parameters that are sharded inside a worker over further mesh axes (fully
    sharded, tensor parallel), which `jax.jit` handles by itself: each device
    compresses its own shard and exchanges it with the same shard of the other
    workers. Nothing is gathered over the further axes, and what is sharded over none
    of them is exchanged as always, once by each of their devices.

    Args:
      exchange: between workers: `sign_mean` or `count_mean`.
      specs: a tree of the parameters' structure with the `PartitionSpec` of each over
        the further axes; inside `optax.masked` or `optax.partition`, of the parameters
        that are left.

    Returns:
      An exchange over the axes of `exchange`. It is used inside a `shard_map` over
      these alone (`axis_names`), as `data_parallel` has with `axis` and `specs` given:
      the further axes stay automatic. Its state is a `SignMeanState` with one server
      error for each set of axes that parameters are sharded over, of shape (workers,
      shards, blocks served, block_size).

    Raises:
      TypeError: if `exchange` has no wire format of its own, or works in two levels.
      ValueError: if a spec names a worker axis, or, from `init` and `update`, if the
        specs are not of the parameters' structure, a dimension cannot be divided
        equally, or a further axis is not automatic.

    Example:
      >>> import onebit_jax
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> specs = {'kernel': P(None, 'model'), 'bias': P()}
      >>> per_shard(onebit_jax.sign_mean('data'), specs).axes
      ('data',)
    """
    wire = getattr(exchange, "wire", None)
    if wire is None:
        raise TypeError(
            "per_shard needs an exchange with a wire format, such as "
            f"sign_mean('data'), got {exchange!r}."
        )
    axes = wire.axes
    all_specs = jax.tree.leaves(specs, is_leaf=is_spec)
    places = _places(specs)
    for spec in all_specs:
        if not _is_usable(spec) or set(axes) & names_of(spec):
            raise ValueError(
                f"per_shard needs PartitionSpecs over other axes than the workers' "
                f"{axes}, got {spec!r}."
            )
    groups = _groups(all_specs)
    first = axes[0] if len(axes) == 1 else axes

    def check_structure(tree: Any) -> None:
        # Optax asks for the state of no parameters, to learn where they are in it.
        found = _places(tree)
        if found and found != places:
            odd = sorted(set(found) ^ set(places)) or found
            raise ValueError(
                "per_shard needs a PartitionSpec for each parameter, P() where it is "
                f"not sharded, and only for these: see {odd[0] or 'the tree itself'}."
            )

    def state_of(worker: Any, servers: Sequence[Array | None]) -> SignMeanState:
        worker_specs = tuple(PartitionSpec(first, *spec) for spec in all_specs)
        return SignMeanState(
            worker_error=PerWorker(worker, axes, "each", worker_specs),
            server_error=tuple(
                PerWorker(
                    server,
                    axes,
                    "split_shards",
                    (PartitionSpec(first, group.names or None),),
                )
                for group, server in zip(groups, servers, strict=True)
            ),
        )

    def server_shape(
        group: _Group, shapes: Sequence[tuple[int, ...]], workers: int, shards: int
    ) -> tuple[int, ...] | None:
        if not wire.has_server:
            return None
        local = [_local_shape(shapes[i], all_specs[i]) for i in group.leaves if shapes]
        _, _, layout = divide(local, wire, workers)
        return (shards, layout.served_blocks, wire.block_size)

    def init_fn(params: optax.Params) -> SignMeanState:
        workers, held = _axes.worker_count(axes)
        check_floats(params, wire)
        check_structure(params)
        shapes = [p.shape for p in jax.tree.leaves(params)]
        worker = jax.tree.map(
            lambda p: jnp.zeros((held, *p.shape), wire.error_dtype), params
        )
        shards = [_size(group.names) for group in groups]
        wanted = [
            server_shape(group, shapes, workers, n)
            for group, n in zip(groups, shards, strict=True)
        ]
        servers = [
            None if shape is None else jnp.zeros((held, *shape), wire.error_dtype)
            for shape in wanted
        ]
        return state_of(worker, servers)

    def exchange_tree(
        updates: optax.Updates, momentum: Any, decay: Any, state: SignMeanState
    ) -> tuple[optax.Updates, SignMeanState]:
        workers = _axes.bound_workers(axes)
        _axes.check_local(updates, axes, f"per_shard {wire.who}")
        check_structure(updates)
        values, treedef = jax.tree.flatten(updates)
        momenta = treedef.flatten_up_to(momentum)
        errors = treedef.flatten_up_to(state.worker_error.value)
        servers = [owed.value for owed in state.server_error]
        shapes = [x.shape for x in values]
        wanted = [server_shape(g, shapes, workers, _size(g.names)) for g in groups]
        found = [None if e is None else e.shape for e in (*errors, *servers)]
        fits = found == [
            None if shape is None else (1, *shape) for shape in (*shapes, *wanted)
        ]
        _axes.check_workers(fits, f"per_shard {wire.who}", workers, axes)

        def local(
            values: list[Array],
            momenta: list[Any],
            errors: list[Array],
            servers: list[Any],
            traced: list[Array],
        ) -> tuple[list[Any], list[Array], list[Any]]:
            own_decay = traced[0] if traced else decay
            means, errors, servers = list(values), list(errors), list(servers)
            for number, (_, places) in enumerate(groups):
                owed: Any = SignMeanState(
                    PerWorker([errors[i] for i in places], axes, "each"),
                    PerWorker(
                        jax.tree.map(lambda x: x[:, 0], servers[number]), axes, "split"
                    ),
                )
                own = [values[i] for i in places]
                held = [momenta[i] for i in places]
                result: Any = (
                    exchange.update(own, owed)
                    if decay is None
                    else exchange.exchange_momentum(own, held, own_decay, owed)
                )
                agreed, owed = result
                servers[number] = jax.tree.map(
                    lambda x: x[:, None], owed.server_error.value
                )
                for i, mean, error in zip(
                    places, agreed, owed.worker_error.value, strict=True
                ):
                    means[i], errors[i] = mean, error
            return means, errors, servers

        traced = [decay] if isinstance(decay, jax.Array) else []
        # Manual over all further axes, so that nothing of it is partitioned anew.
        further = _further(axes)
        held = [PartitionSpec(None, *spec) for spec in all_specs]
        served = [PartitionSpec(None, group.names or None) for group in groups]
        run = local
        if further:
            run = jax.shard_map(
                local,
                in_specs=(all_specs, all_specs, held, served, PartitionSpec()),
                out_specs=(all_specs, held, served),
                axis_names=further,
                check_vma=set(axes) <= _axes.varying_axes(_axes.worker_index(axes)),
            )
        means, errors, servers = run(values, momenta, errors, servers, traced)
        return treedef.unflatten(means), state_of(treedef.unflatten(errors), servers)

    return Exchange.of_momentum(init_fn, exchange_tree, axes, delay=exchange.delay)


def _places(tree: Any) -> list[str]:
    """The paths of a tree's leaves; Optax's masks have none."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_spec)
    return [jax.tree_util.keystr(path) for path, _ in leaves]


def _groups(specs: list[PartitionSpec]) -> tuple[_Group, ...]:
    found: dict[tuple[str, ...], list[int]] = {}
    for i, spec in enumerate(specs):
        found.setdefault(tuple(sorted(names_of(spec))), []).append(i)
    return tuple(_Group(names, tuple(leaves)) for names, leaves in found.items())


def _is_usable(spec: Any) -> bool:
    return is_spec(spec) and all(
        entry is None or isinstance(entry, (str, tuple)) for entry in spec
    )


def _further(axes: tuple[str, ...]) -> set[str]:
    """The mesh axes beside the workers', all of which must be automatic."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    further = {name for name in types if name not in axes}
    wrong = sorted(name for name in further if types[name] != AxisType.Auto)
    if wrong:
        raise ValueError(
            f"per_shard needs the mesh's axis {wrong[0]!r} to be AxisType.Auto, and it "
            f"is {types[wrong[0]]}: make the mesh so, and call update inside "
            f"jax.shard_map(axis_names={set(axes)})."
        )
    return further


def _size(names: tuple[str, ...]) -> int:
    shape = jax.sharding.get_abstract_mesh().shape
    missing = [name for name in names if name not in shape]
    if missing:
        raise ValueError(
            f"the mesh has no axis {missing[0]!r}, which per_shard's specs name: its "
            f"axes are {tuple(shape)}."
        )
    return math.prod(shape[name] for name in names)


def _local_shape(shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
    """The shape of one shard."""
    parts = [_size(entry_names(entry)) for entry in spec]
    if len(parts) > len(shape) or any(
        size % n for size, n in zip(shape, parts, strict=False)
    ):
        raise ValueError(
            f"a parameter of shape {shape} cannot be divided equally by {spec}: give "
            "it a spec whose axes divide its dimensions."
        )
    rest = len(shape) - len(parts)
    return tuple(s // n for s, n in zip(shape, [*parts, *[1] * rest], strict=True))
