"""The collectives of an optimizer's stages, read from its traced update."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from onebit_jax.workers.placement import abstract_state, check_params, state_specs
from onebit_jax.workers.specs import context_of
from onebit_jax.workers.stages import stage_of
from onebit_jax.workers.states import name_in, stages_by_part
from onebit_jax.workers.transfers import Transfer, sent_bytes
from onebit_jax.workers.worker_local import check_agreed, worker_local_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import optax

_OPS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "ppermute": "collective-permute",
}
_SEND_NOTHING = {"axis_index", "pcast", "pvary"}


def stage_costs(
    tx: optax.GradientTransformation,
    params: Any,
    axis_sizes: Mapping[str, int],
    **extra: Any,
) -> dict[str, tuple[Transfer, ...]]:
    """The collectives of a step of each of an optimizer's stages.

    They are found by tracing `update`, which takes seconds for a thousand leaves and
    compiles nothing. Of the branches of a condition the one that sends most counts.
    What nothing reads, such as the mean of a frozen layer, does not count. All
    all-reduces of a stage over the same axes are one, as the compiler puts them
    together. Inside `accumulate` a step is one that updates, and not each call. The
    means that `data_parallel` takes, of the loss and of auxiliary values, are no part
    of `update` and not counted: `onebit_jax.traffic` counts all of a compiled step.

    Args:
      tx: an optimizer, wrappers such as `skip_nonfinite` included, or an exchange.
      params: parameters, or their shapes and dtypes; if sharded inside a worker, with
        their shardings, or they count as whole.
      axis_sizes: sizes of the mesh axes, such as `mesh.shape`: the workers', and those
        that `per_shard` names.
      **extra: what `update` needs by name besides, as `run.step` of `data_parallel`
        is given it.

    Returns:
      For each stage of `steps_by_stage`, in the optimizer's order, its collectives,
      which `sent_bytes` adds up; for an optimizer without stages those of every step,
      as 'every'. Of several parts, as in `optax.partition`, the stages of each; what is
      in no stage is among those of the first.

    Raises:
      TypeError: if the sizes are no mapping.
      ValueError: if the update has a collective of a kind that is not known, or in a
        loop whose length is not. Also if it has one in a stage that several parts have
        and none chooses by its state, or if what it returns differs between workers.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.zero_one_adam(
      ...     1e-3, onebit_jax.sign_mean('data'), onebit_jax.freeze_at(10))
      >>> costs = stage_costs(tx, jnp.zeros((256, 256)), {'data': 8})
      >>> for stage, transfers in costs.items():
      ...     print(stage, onebit_jax.sent_bytes(transfers, {'data': 8}))
      variance 473536
      compressed 14784
      local 0
    """
    if not isinstance(axis_sizes, Mapping):
        raise TypeError(
            f"axis_sizes must be the sizes of the mesh axes by name, got a "
            f"{type(axis_sizes).__name__}: give mesh.shape."
        )
    # Explicit axes, the default from jax 0.11 on, would ask for placed arguments.
    automatic = (AxisType.Auto,) * len(axis_sizes)
    mesh = AbstractMesh(tuple(axis_sizes.values()), tuple(axis_sizes), automatic)
    check_params(params)
    # Whatever mesh the caller has set.
    with context_of(mesh):
        state = abstract_state(tx, params, mesh)
        parts = stages_by_part(state)
        found = list(_traced(tx, params, state, mesh, parts, **extra))
    if not parts:
        return {"every": _merged(each.transfer for each in found)}
    everywhere = [f for f in found if f.stage is None]
    costs = {}
    for part, (_, stages) in parts.items():
        own = [f for f in found if f.stage and _part_of(f, parts) == part]
        # What is in no stage runs in every step, and is told of one part.
        told = own if costs else [*own, *everywhere]
        for name in stages:
            around = name.partition("/")[0]
            inside = (f.transfer for f in told if f.stage in (None, around, name))
            costs[name_in(part, name)] = _merged(inside)
    return costs


class _Found(NamedTuple):
    """A collective, the stage that it is in, and the parts that choose this stage."""

    stage: str | None
    transfer: Transfer
    chosen_by: frozenset[str] = frozenset()


def _part_of(found: _Found, parts: Mapping[str, Any]) -> str:
    """The part of the state whose stage a collective is in."""
    names = {part: stages for part, (_, stages) in parts.items()}
    having = [part for part in names if found.stage in names[part]]
    if len(having) > 1:
        having = [part for part in having if {part} == found.chosen_by]
    if len(having) != 1:
        raise ValueError(
            f"stage_costs cannot tell whose stage {found.stage!r} is: compile a step "
            "and count its bytes with onebit_jax.traffic."
        )
    return having[0]


def _traced(
    tx: Any,
    params: Any,
    state: Any,
    mesh: AbstractMesh,
    parts: Mapping[str, Any],
    **extra: Any,
) -> Iterator[_Found]:
    named = {name for node in worker_local_nodes(state) for name in node.axes}
    axes = tuple(name for name in mesh.axis_names if name in named or not named)
    workers, specs = PartitionSpec(axes), state_specs(state)

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        own = jax.tree.map(lambda x: x[0], updates)
        new_updates, new_state = tx.update(own, state, params, **extra)
        check_agreed(new_updates, new_state, axes)
        return new_updates, new_state

    mapped = jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(workers, specs, PartitionSpec()),
        out_specs=(PartitionSpec(), specs),
        axis_names=set(axes),
    )
    number = math.prod(mesh.shape[name] for name in axes)
    own = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct((number, *p.shape), p.dtype), params
    )
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    jaxpr = jax.make_jaxpr(mapped)(own, state, shapes).jaxpr
    nothing = [frozenset[str]()] * len(jax.tree.leaves(params))
    of_state = [_holders(path, parts) for path, _ in jax.tree.leaves_with_path(state)]
    read = [True] * len(jaxpr.outvars)
    return _collectives(jaxpr, read, [*nothing, *of_state, *nothing], "", mesh.shape)


def _holders(path: Any, parts: Mapping[str, Any]) -> frozenset[str]:
    """The part of the state that an array is in, the innermost."""
    holders = {
        len(place): part
        for part, (place, _) in parts.items()
        if path[: len(place)] == place
    }
    return frozenset([holders[max(holders)]] if holders else [])


def _collectives(
    jaxpr: Any,
    read: list[bool],
    made_of: list[frozenset[str]],
    around: str,
    axis_sizes: Mapping[str, int],
) -> Iterator[_Found]:
    """The collectives of a traced function, of whose results some are read.

    Its arguments are made of some parts of the state.
    """
    parts_in = dict(zip(jaxpr.invars, made_of, strict=True))
    for eqn, read_of_eqn in _needed(jaxpr, read):
        given = [
            frozenset() if isinstance(v, Literal) else parts_in.get(v, frozenset())
            for v in eqn.invars
        ]
        parts_in |= dict.fromkeys(eqn.outvars, frozenset().union(*given))
        scopes = f"{around}/{eqn.source_info.name_stack}"
        name = eqn.primitive.name
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple) else (axes,)
        # Numbers are axes of arrays.
        names = tuple(axis for axis in axes if isinstance(axis, str))
        if name in _OPS:
            held = eqn.outvars if _OPS[name] == "all-gather" else eqn.invars
            size = sum(v.aval.size * v.aval.dtype.itemsize for v in held)
            yield _Found(stage_of(scopes), Transfer(_OPS[name], size, names))
        elif names and name not in _SEND_NOTHING:
            raise ValueError(
                f"stage_costs does not know the collective {name!r}: compile a step "
                "and count its bytes with onebit_jax.traffic."
            )
        inner = [
            list(
                _collectives(
                    x,
                    _read_inside(x, eqn, read_of_eqn),
                    # The condition comes first.
                    given[len(given) - len(x.invars) :],
                    scopes,
                    axis_sizes,
                )
            )
            for x in _jaxprs(eqn)
        ]
        if name == "cond":
            yield from _of_branches(inner, given[0], stage_of(scopes), axis_sizes)
            continue
        if name == "while" and any(inner):
            raise ValueError(
                "stage_costs does not know how often a loop with a collective runs: "
                "compile a step and count its bytes with onebit_jax.traffic."
            )
        times = eqn.params["length"] if name == "scan" else 1
        for each in itertools.chain.from_iterable(inner):
            sent = each.transfer._replace(bytes=times * each.transfer.bytes)
            yield each._replace(transfer=sent)


def _of_branches(
    branches: list[list[_Found]],
    chosen_by: frozenset[str],
    stage: str | None,
    axis_sizes: Mapping[str, int],
) -> Iterator[_Found]:
    """Those of all stages that begin here, and of the branch that sends most."""
    for each in itertools.chain.from_iterable(branches):
        if each.stage != stage:
            yield each._replace(chosen_by=each.chosen_by or chosen_by)
    beside = [[each for each in found if each.stage == stage] for found in branches]
    yield from max(
        beside,
        key=lambda found: sent_bytes((each.transfer for each in found), axis_sizes),
    )


def _needed(jaxpr: Any, read: list[bool]) -> list[tuple[Any, list[bool]]]:
    """The equations whose results are read, and which of these are.

    The compiler leaves the others out, as the exact mean of a frozen layer.
    """
    used = {
        v
        for v, is_read in zip(jaxpr.outvars, read, strict=True)
        if is_read and not isinstance(v, Literal)
    }
    needed = []
    for eqn in reversed(jaxpr.eqns):
        read_of_eqn = [v in used for v in eqn.outvars]
        if any(read_of_eqn) or any(map(_is_observed, eqn.effects)):
            used.update(v for v in eqn.invars if not isinstance(v, Literal))
            needed.append((eqn, read_of_eqn))
    return needed[::-1]


def _is_observed(effect: Any) -> bool:
    """True of printing and the like; the use of a mesh axis is an effect, too."""
    # JAX has no public name for this effect.
    return type(effect).__name__ != "NamedAxisEffect"


def _read_inside(jaxpr: Any, eqn: Any, read: list[bool]) -> list[bool]:
    """Which results of a function that an equation calls are read."""
    number = len(jaxpr.outvars)
    # What a loop carries is read by its next turn.
    is_loop = eqn.primitive.name in ("scan", "while")
    return [True] * number if is_loop or number != len(read) else read


def _jaxprs(eqn: Any) -> list[Any]:
    """The functions that an equation calls."""
    params = jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
    return [getattr(x, "jaxpr", x) for x in params if _is_jaxpr(x)]


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")


def _merged(transfers: Any) -> tuple[Transfer, ...]:
    """With the all-reduces over the same axes as one."""
    sums: dict[tuple[str, ...], int] = {}
    others = []
    for transfer in transfers:
        if transfer.op != "all-reduce":
            others.append(transfer)
        elif transfer.bytes:
            sums[transfer.axes] = sums.get(transfer.axes, 0) + transfer.bytes
    reduced = (Transfer("all-reduce", size, axes) for axes, size in sums.items())
    return *reduced, *(t for t in others if t.bytes)
