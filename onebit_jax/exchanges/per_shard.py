"""An exchange between workers whose parameters are sharded inside each worker."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import optax
from jax.sharding import AxisType, PartitionSpec

from onebit_jax.exchanges.exchange import Exchange
from onebit_jax.exchanges.shards import (
    PerShardState,
    add_shard_axis,
    of_shard,
    put_shard,
)
from onebit_jax.workers.axes import (
    check_floats,
    check_local,
    is_recorded,
)
from onebit_jax.workers.specs import (
    LeafSpecs,
    entry_names,
    is_spec,
    names_of,
)
from onebit_jax.workers.worker_local import is_worker_local

if TYPE_CHECKING:
    from collections.abc import Mapping


def per_shard(exchange: Exchange, specs: Any) -> Exchange:
    r"""Exchanges each shard of the parameters by itself, over the workers alone.

    This is for parameters that are sharded inside a worker over further mesh axes
    (fully sharded, tensor parallel), which `jax.jit` handles by itself. Each device
    compresses its own shard and exchanges it with the same shard of the other workers.
    Nothing is gathered over the further axes, and what is sharded over none of them is
    exchanged as always, once by each of their devices.

    Args:
      exchange: between workers, such as `sign_mean('data')`.
      specs: a tree of the parameters' structure with the `PartitionSpec` of each over
        the further axes; inside `optax.masked` or `optax.partition`, of the parameters
        that are left.

    Returns:
      An exchange over the axes of `exchange`. It is used inside a `shard_map` over
      these alone (`axis_names`), as `data_parallel` has with `axis` and `specs` given:
      the further axes stay automatic. Its state has a part for each set of axes that
      parameters are sharded over. The part is the state of `exchange` for a shard of
      these parameters, with an axis of shards after that of the workers.

    Raises:
      TypeError: if `exchange` is no exchange, or, from `init`, is `hierarchical` or
        `per_shard` itself.
      ValueError: if a spec is no `PartitionSpec` or names a worker axis. From `init`,
        if the mesh lacks an axis of a spec or a dimension cannot be divided equally.
        From `update`, if a further axis is not automatic. From both, if the specs are
        not of the parameters' structure.

    Example:
      >>> import onebit_jax
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> specs = {'kernel': P(None, 'model'), 'bias': P()}
      >>> per_shard(onebit_jax.sign_mean('data'), specs).axes
      ('data',)
    """
    if not isinstance(exchange, Exchange):
        raise TypeError(
            "per_shard needs an exchange between workers, such as sign_mean('data'), "
            f"got {exchange!r}."
        )
    axes = exchange.axes
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        if not _is_usable(spec) or set(axes) & names_of(spec):
            raise ValueError(
                f"per_shard needs PartitionSpecs over other axes than the workers' "
                f"{axes}, got {spec!r}; give an exchange without the axes that "
                "parameters are sharded over, such as sign_mean('host') in place of "
                "hierarchical."
            )
    return PerShard(exchange, specs, axes)


class _Group(NamedTuple):
    """Leaves that are sharded over the same mesh axes, in any of their dimensions."""

    names: tuple[str, ...]
    leaves: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PerShard(Exchange, of_shards=False):
    """The exchange of `per_shard`.

    Attributes:
      exchange: between workers.
      specs: a tree of the parameters' structure with their partitions.
      axes: the worker axes.
    """

    exchange: Exchange
    specs: Any
    axes: tuple[str, ...]

    @property
    def keeps_scale(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The exchange's between workers."""
        return self.exchange.keeps_scale

    def is_exact(self, shape: tuple[int, ...]) -> bool:
        """The exchange's between workers."""
        return self.exchange.is_exact(shape)

    def is_alone(self) -> bool:
        """True of one worker, however many devices share its parameters."""
        return self.exchange.is_alone()

    def init(self, params: optax.Params) -> PerShardState:
        """A state for each group of leaves."""
        self._check_structure(params)
        check_floats(params, "per_shard")
        axis_sizes = jax.sharding.get_abstract_mesh().shape
        states = []
        for group, shapes in self._shards(params, axis_sizes):
            shards = _size(group.names, axis_sizes)
            state = self.exchange.init(shapes)
            states.append(add_shard_axis(state, shards, group.names, inside=False))
        return PerShardState(tuple(states), self._places_and_specs())

    def update(
        self,
        updates: optax.Updates,
        state: PerShardState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, PerShardState]:
        """Each group's shards, by the devices that hold them."""
        del params
        check_local(updates, self.axes, "per_shard")
        self._check_structure(updates)
        values, treedef = jax.tree.flatten(updates)
        groups = _groups(self._leaf_specs)

        def of_shards(values: list[Any], states: tuple[Any, ...]) -> Any:
            means, new_states = list(values), []
            for group, its_state in zip(groups, states, strict=True):
                shards: Any = [values[i] for i in group.leaves]
                group_means: Any
                group_means, new = self.exchange.update(
                    shards, of_shard(its_state, self.axes)
                )
                new_states.append(put_shard(its_state, new))
                for i, mean in zip(group.leaves, group_means, strict=True):
                    means[i] = mean
            return means, tuple(new_states)

        # Manual over all further axes, so that the compiler partitions none of it.
        further = _further(self.axes)
        run = of_shards
        if further:
            specs = self._leaf_specs
            state_specs = tuple(
                _state_specs(its_state, group.names)
                for group, its_state in zip(groups, state.groups, strict=True)
            )
            run = jax.shard_map(
                of_shards,
                in_specs=(specs, state_specs),
                out_specs=(specs, state_specs),
                axis_names=further,
                check_vma=is_recorded(self.axes),
            )
        means, states = run(values, state.groups)
        return treedef.unflatten(means), PerShardState(states, state.specs)

    def _places_and_specs(self) -> LeafSpecs:
        return LeafSpecs(tuple(_places(self.specs)), tuple(self._leaf_specs))

    @property
    def _leaf_specs(self) -> list[PartitionSpec]:
        return jax.tree.leaves(self.specs, is_leaf=is_spec)

    def _shards(
        self, params: Any, axis_sizes: Mapping[str, int]
    ) -> list[tuple[_Group, Any]]:
        """The groups, with the shapes of one shard of each of their leaves."""
        leaves, specs = jax.tree.leaves(params), self._leaf_specs
        return [
            (
                group,
                [
                    jax.ShapeDtypeStruct(
                        _local_shape(leaves[i].shape, specs[i], axis_sizes),
                        leaves[i].dtype,
                    )
                    for i in group.leaves
                    # Optax's tree_map_params calls init with a tree without leaves.
                    if leaves
                ],
            )
            for group in _groups(specs)
        ]

    def _check_structure(self, tree: Any) -> None:
        # Optax's tree_map_params calls init with a tree without leaves.
        places, wanted = _places(tree), _places(self.specs)
        if places and places != wanted:
            odd = sorted(set(places) ^ set(wanted)) or places
            raise ValueError(
                "per_shard needs a PartitionSpec for each parameter, P() where it is "
                f"not sharded, and only for these: see {odd[0] or 'the tree itself'}."
            )


def _state_specs(state: Any, names: tuple[str, ...]) -> Any:
    """The partitions of a group's state over the further axes."""
    spec = PartitionSpec(None, names or None)
    return jax.tree.map(
        lambda node: (
            jax.tree.map(lambda _: spec, node)
            if is_worker_local(node)
            else PartitionSpec()
        ),
        state,
        is_leaf=is_worker_local,
    )


def _places(tree: Any) -> list[str]:
    """The paths of a tree's leaves; Optax's masks have none."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_spec)
    return [jax.tree_util.keystr(path) for path, _ in leaves]


def _groups(specs: list[PartitionSpec]) -> tuple[_Group, ...]:
    by_names: dict[tuple[str, ...], list[int]] = {}
    for i, spec in enumerate(specs):
        by_names.setdefault(tuple(sorted(names_of(spec))), []).append(i)
    return tuple(_Group(names, tuple(at)) for names, at in by_names.items())


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


def _size(names: tuple[str, ...], axis_sizes: Mapping[str, int]) -> int:
    missing = [name for name in names if name not in axis_sizes]
    if missing:
        raise ValueError(
            f"the mesh has no axis {missing[0]!r}, which per_shard's specs name: its "
            f"axes are {tuple(axis_sizes)}."
        )
    return math.prod(axis_sizes[name] for name in names)


def _local_shape(
    shape: tuple[int, ...], spec: PartitionSpec, axis_sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of one shard."""
    parts = [_size(entry_names(entry), axis_sizes) for entry in spec]
    if len(parts) > len(shape) or any(
        size % n for size, n in zip(shape, parts, strict=False)
    ):
        raise ValueError(
            f"a parameter of shape {shape} cannot be divided equally by {spec}: give "
            "it a spec whose axes divide its dimensions."
        )
    rest = len(shape) - len(parts)
    return tuple(s // n for s, n in zip(shape, [*parts, *[1] * rest], strict=True))
