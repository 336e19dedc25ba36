"""Checks of what a training step is given, before it is traced."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from onebit_jax.workers.states import is_declared, stages_by_part
from onebit_jax.workers.worker_local import (
    is_own_array,
    is_worker_local,
    types_by_path,
    worker_local_nodes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_given(
    batch: Any,
    state: Any,
    made: Any,
    stage: str | None,
    axes: tuple[str, ...],
    axis_sizes: Mapping[str, int],
) -> None:
    """Refuses what a step of `data_parallel` cannot take.

    Args:
      batch: the examples of all workers.
      state: the optimizer's.
      made: the shapes of the state that would be made anew.
      stage: the only one of the program, or None.
      axes: the workers'.
      axis_sizes: the mesh's.
    """
    workers = math.prod(axis_sizes[name] for name in axes)
    check_batch(batch, workers, axes, "to run.step after the batch")
    check_workers_of(state, axis_sizes)
    check_made_for(state, made)
    check_known_stage(state, stage)


def check_batch(
    batch: Any, workers: int, axes: tuple[str, ...], otherwise: str
) -> None:
    """Refuses a batch that cannot be shared equally.

    Args:
      batch: the examples of all workers.
      workers: how many they are divided among.
      axes: the axes of these.
      otherwise: how what is no list of examples is passed.
    """
    lengths: dict[int, str] = {}
    for path, leaf in jax.tree.leaves_with_path(batch):
        if not leaf.shape or leaf.shape[0] % workers:
            name = jax.tree_util.keystr(path)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise ValueError(
                    f"the batch's leaf {name or 'itself'} is a random key, and the "
                    f"batch is divided among the workers: pass the key {otherwise}."
                )
            raise ValueError(
                f"the batch's leaf {name or 'itself'} has shape {leaf.shape}: its "
                f"first axis must be a multiple of the {workers} workers of {axes}."
            )
        if not leaf.shape[0]:
            raise ValueError("the batch has no examples: leave out the step.")
        lengths.setdefault(leaf.shape[0], jax.tree_util.keystr(path))
    if len(lengths) > 1:
        told = " and ".join(f"{name} has {n}" for n, name in lengths.items())
        raise ValueError(
            f"the batch's leaves have different numbers of examples ({told}): pass "
            f"what is no list of examples {otherwise}."
        )


def check_axes(
    state: Any,
    axes: tuple[str, ...],
    where: str,
    around: frozenset[str] = frozenset(),
) -> None:
    """Refuses an optimizer, or a part of it for some leaves, that leaves out an axis.

    Args:
      state: of the optimizer or the part.
      axes: the workers'.
      where: how they were named.
      around: axes of exchanges that stand around a part, for all leaves.
    """
    named = _exchanged_over(state)
    if named and named | around != set(axes):
        raise ValueError(
            f"the batch is divided over {axes} and the optimizer's exchange works over "
            f"{tuple(sorted(named))}: name the same axes in {where} and in the "
            "exchange of every part."
        )
    parts: list[Any] = []
    for node in jax.tree.leaves(state, is_leaf=lambda x: _is_part(x) or _is_own(x)):
        if isinstance(node, optax.transforms.PartitionState):
            parts += node.inner_states.values()
        elif isinstance(node, optax.MaskedState) and _keeps_agreed(node):
            parts.append(node)
        else:
            around |= _exchanged_over(node)
    for part in parts:
        check_axes(part.inner_state, axes, where, around)


def _exchanged_over(state: Any) -> frozenset[str]:
    """The axes of a state's exchanges, and not those of what workers keep alone."""
    found: set[str] = set()
    for node in jax.tree.leaves(state, is_leaf=_is_own):
        inside = worker_local_nodes(node)
        if not is_worker_local(node):
            inside = [each for each in inside if not is_own_array(each)]
        found |= {name for each in inside for name in each.axes}
    return frozenset(found)


def _is_own(node: Any) -> bool:
    return is_worker_local(node) or (is_declared(node) and node.is_opaque)


def _is_part(node: Any) -> bool:
    return isinstance(node, optax.transforms.PartitionState | optax.MaskedState)


def _keeps_agreed(state: Any) -> bool:
    """True of moments that are the same on all workers, as gradients were before."""
    return any(
        not is_worker_local(x) and jnp.issubdtype(x.dtype, jnp.floating)
        for x in jax.tree.leaves(state, is_leaf=is_worker_local)
    )


def check_workers_of(state: Any, axis_sizes: Mapping[str, int]) -> None:
    """Refuses a state of other worker axes, or of another number of workers."""
    for node in worker_local_nodes(state):
        axes = node.leading_axes()
        if not set(axes) <= set(axis_sizes):
            raise ValueError(
                f"the state was made for workers along {axes}, and the axes here are "
                f"{tuple(axis_sizes)}: name the same axes in the exchange, or make the "
                "state anew with run.init(params)."
            )
        workers = math.prod(axis_sizes[name] for name in axes)
        for leaf in jax.tree.leaves(node):
            if leaf.shape[0] != workers:
                raise ValueError(
                    f"the state was made for {leaf.shape[0]} workers and there are "
                    f"{workers} here: convert it with onebit_jax.resize."
                )


def check_made_for(state: Any, made: Any) -> None:
    """Refuses a state of another optimizer or exchange, or of other parameters."""
    given, needed = ({**types_by_path(tree), **_kinds(tree)} for tree in (state, made))
    for path in (*needed, *given):
        if given.get(path) != needed.get(path):
            there, here = (x.get(path, "missing") for x in (given, needed))
            raise ValueError(
                "the state was made by another optimizer or for other parameters: its "
                f"{path or 'whole'} is {there} and would be {here} with these; restore "
                "a checkpoint to the shapes of onebit_jax.abstract_state(tx, params, "
                "mesh), or make the state anew with run.init(params)."
            )


def _kinds(tree: Any, above: Any = ()) -> dict[str, str]:
    """For the path of each state inside another the name of its class."""

    def is_state(node: Any) -> bool:
        return node is not tree and hasattr(type(node), "_fields")

    kinds = {}
    for path, node in jax.tree.leaves_with_path(tree, is_leaf=is_state):
        if is_state(node):
            path = (*above, *path)
            kinds[jax.tree_util.keystr(path)] = type(node).__name__
            kinds |= _kinds(node, path)
    return kinds


def check_known_stage(state: Any, stage: str | None) -> None:
    """Refuses a stage that the optimizer does not have."""
    parts = [stages for _, stages in stages_by_part(state).values()]
    # A nested stage ('compressed/measuring') cannot be compiled alone.
    stages = [s for s in parts[0] if "/" not in s] if parts else []
    stages = [s for s in stages if all(s in others for others in parts)]
    if stage is not None and stage not in stages:
        known = ", ".join(map(repr, stages)) or "it has none"
        raise ValueError(
            f"the optimizer has no stage {stage!r}: name one of its own ({known}), or "
            "leave the stage out."
        )
