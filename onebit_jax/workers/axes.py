"""Worker axes: their names, their size, and what must vary over them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

AxisNames = str | tuple[str, ...]


def as_tuple(axis: AxisNames) -> tuple[str, ...]:
    """The axis names as a tuple."""
    if isinstance(axis, str):
        axis = (axis,)
    axes = tuple(axis) if isinstance(axis, tuple | list) else ()
    names = all(isinstance(name, str) for name in axes)
    if not axes or not names or len(set(axes)) < len(axes):
        raise ValueError(
            "axis must be the name of a mesh axis or a tuple of different names, got "
            f"{axis!r}."
        )
    return axes


def bound_workers(axes: tuple[str, ...]) -> int:
    """The number of workers, where collectives over their axes are possible.

    Args:
      axes: names of the worker axes.

    Returns:
      The number of workers.

    Raises:
      ValueError: if an axis is not bound by `shard_map` or the like.
    """
    try:
        return math.prod(lax.axis_size(name) for name in axes)
    except NameError:
        raise not_bound(axes) from None


def worker_count(axes: tuple[str, ...]) -> tuple[int, int]:
    """The number of workers, and how many of them this program's arrays hold.

    Inside `shard_map` a program holds one worker's slice. Outside it holds all
    workers', and their number is read from the mesh in context.

    Args:
      axes: names of the worker axes.

    Returns:
      The number of workers, and the length of the leading axis of worker-local
      arrays here: 1, or the number of workers.

    Raises:
      ValueError: if an axis is neither bound nor in the mesh in context.
    """
    try:
        return math.prod(lax.axis_size(name) for name in axes), 1
    except NameError:
        shape = dict(jax.sharding.get_abstract_mesh().shape)
        if all(name in shape for name in axes):
            workers = math.prod(shape[name] for name in axes)
            return workers, workers
        raise not_bound(axes) from None


def not_bound(axes: tuple[str, ...]) -> ValueError:
    """The error of worker axes that are neither bound nor in the mesh in context."""
    known = tuple(jax.sharding.get_abstract_mesh().shape)
    if not known:
        return ValueError(
            f"worker axis {axes} is not bound, as there is no mesh here: make the step "
            "by onebit_jax.data_parallel(loss_fn, tx, mesh) and the state by its "
            "run.init(params), or call update in a step of onebit_jax.worker_step and "
            "make the state by onebit_jax.init(tx, params, mesh); nnx.Optimizer does "
            "neither. In onebit_jax.simulated(axis=...) give this name."
        )
    if not set(axes) <= set(known):
        return ValueError(
            f"worker axis {axes} is not bound: the axes here are {known}; give the "
            "exchange, and all else that names an axis, one of these."
        )
    return ValueError(
        f"worker axis {axes} is not bound, though the mesh has it: call update in a "
        "step of onebit_jax.data_parallel or onebit_jax.worker_step, or inside "
        "jax.shard_map over that axis."
    )


def check_no_variables(params: Any) -> None:
    """Refuses what `nnx.Optimizer` gives to an optimizer's `init`.

    Elsewhere variables of Flax NNX come traced: `onebit_jax.init` places the state.
    """
    for node in jax.tree.leaves(params, is_leaf=is_variable):
        concrete = [x for x in jax.tree.leaves(node) if not isinstance(x, Tracer)]
        if is_variable(node) and concrete:
            raise ValueError(
                "nnx.Optimizer cannot hold what differs from worker to worker: split "
                "the model, graph, params, rest = nnx.split(model, nnx.Param, ...), "
                "and train params by onebit_jax.data_parallel, or by "
                "onebit_jax.worker_step and onebit_jax.init(tx, params, mesh)."
            )


def is_variable(node: Any) -> bool:
    """True of a variable of Flax NNX, which this package does not import."""
    return any(
        kind.__module__.startswith("flax.") and kind.__name__ == "Variable"
        for kind in type(node).__mro__
    )


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes that a value, or a shape, differs over by its type."""
    kind = (
        x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    ).manual_axis_type
    # A shape made without check_vma has none.
    return frozenset(kind.varying if kind else ())


def is_recorded(axes: tuple[str, ...]) -> bool:
    """True where types tell what differs over the axes.

    Not without `check_vma`, nor where `jax.vmap` binds the axes, nor outside of both.
    """
    try:
        # The worker's own index differs.
        return set(axes) <= varying_axes(lax.axis_index(axes))
    except NameError:
        return False


def is_agreed(x: Any, axes: tuple[str, ...]) -> bool:
    """True of a value recorded as the same on the workers of some of the axes."""
    return is_recorded(axes) and not set(axes) <= varying_axes(x)


def check_local(updates: Any, axes: tuple[str, ...], who: str) -> None:
    """Refuses leaves that an exchange cannot, or must not, average.

    Args:
      updates: each worker's own tree.
      axes: the worker axes.
      who: the exchange's name, for error messages.

    Raises:
      TypeError: if a leaf is not real floating-point.
      ValueError: if an axis is not bound, or a leaf is the same on all workers: it was
        averaged, or summed, before. Only `shard_map(check_vma=True)` records this.

    Warns:
      UserWarning: where nothing records it.
    """
    bound_workers(axes)
    check_floats(updates, who)
    _warn_of_averages(axes)
    for path, leaf in jax.tree.leaves_with_path(updates):
        if is_agreed(leaf, axes):
            raise ValueError(
                f"{who} needs each worker's own gradients, but "
                f"{jax.tree_util.keystr(path) or 'the only leaf'} is already "
                f"the same on every worker of {axes}: jax.grad with respect to "
                "replicated parameters sums over the workers in full precision; "
                "use onebit_jax.local_value_and_grad, no pmean and no other exchange "
                "before it, and onebit_jax.accumulate instead of optax.MultiSteps."
            )


def _warn_of_averages(axes: tuple[str, ...]) -> None:
    """Tells that averaged gradients are not refused by `jax.pmap` and the like."""
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    if set(axes) <= manual and not is_recorded(axes):
        # Python shows a warning of one place once.
        warnings.warn(
            f"gradients that are averaged over {axes} already cannot be told from each "
            "worker's own inside jax.pmap or shard_map(check_vma=False): leave out the "
            "jax.lax.pmean of gradients, which sends them in full precision, or use "
            "onebit_jax.worker_step, which refuses it. Without one all is well; it "
            "is told once, and warnings.filterwarnings('ignore', 'gradients that are "
            "averaged') before the first step silences it.",
            stacklevel=2,
        )


def check_all_axes(updates: Any, axes: tuple[str, ...], who: str) -> None:
    """Refuses leaves that differ over other axes than the workers'.

    What is decided by them, or kept of them, would differ over these axes as well.
    """
    for path, leaf in jax.tree.leaves_with_path(updates):
        further = sorted(varying_axes(leaf) - set(axes))
        if further:
            raise ValueError(
                f"{who} is given {axes} as the axes of the workers, and "
                f"{jax.tree_util.keystr(path) or 'the update'} differs over {further} "
                "too: give it the axes of all workers; those that shard parameters "
                "inside a worker must be automatic."
            )


def check_floats(tree: Any, who: str) -> None:
    """Refuses leaves that are not real floating-point."""
    check_no_variables(tree)
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
            raise TypeError(
                f"{who} exchanges real floating-point leaves only, but "
                f"{jax.tree_util.keystr(path) or 'the only leaf'} is {leaf.dtype}: "
                + (
                    "train its real and its imaginary part."
                    if is_complex
                    else "keep it out of the parameters, and pass it beside the batch."
                )
            )


def check_workers(fits: bool, who: str, workers: int, axes: tuple[str, ...]) -> None:
    """Refuses a state that was made for another number of workers."""
    if not fits:
        raise ValueError(
            f"{who}'s state was not made for these leaves on the {workers} workers of "
            f"{axes}: make it from the updates' own tree, pass it through shard_map "
            "with onebit_jax.state_specs(state), and convert a state of another "
            "number of workers with onebit_jax.resize."
        )


def to_varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """Types every leaf as varying over the axes; its values stay."""
    if not is_recorded(axes):
        return tree

    def cast(x: Any) -> Any:
        missing = tuple(name for name in axes if name not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)
