"""State that each worker keeps for itself: any transformation, once a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax.workers.axes import (
    AxisNames,
    as_tuple,
    bound_workers,
    check_local,
    check_workers,
    to_varying,
    worker_count,
)
from onebit_jax.workers.states import declared, optimizer_state
from onebit_jax.workers.worker_local import (
    WorkerLocal,
    is_over,
    is_own_array,
    worker_local_nodes,
)

if TYPE_CHECKING:
    from jax import Array


@optimizer_state
class PerWorkerState(NamedTuple):
    """State of `per_worker`.

    Attributes:
      inner: the transformation's state, a `WorkerLocal` in the place of each leaf.
    """

    inner: Any

    is_opaque = True

    def metrics(self) -> dict[str, Array]:
        """The means over the workers of what the transformation's state measures."""

        def measured(own: Any) -> dict[str, Array]:
            found: dict[str, Array] = {}
            for node in declared((own,)):
                found |= node.metrics()
            return found

        leaves, treedef = jax.tree.flatten(self.inner, is_leaf=is_own_array)
        arrays = [jax.tree.leaves(node)[0] for node in leaves]
        each = jax.vmap(lambda xs: measured(treedef.unflatten(xs)))(arrays)
        return {
            name: jnp.mean(x.astype(jnp.float32), axis=0) for name, x in each.items()
        }


def per_worker(
    tx: optax.GradientTransformation, axis: AxisNames
) -> optax.GradientTransformationExtraArgs:
    r"""Applies a transformation to each worker's own gradients, with its own state.

    .. math:: u^{(i)}, s^{(i)} \leftarrow T(g^{(i)}, s^{(i)})

    Nothing is exchanged: updates are each worker's own, for an exchange that follows.
    Each leaf of the state is in a `WorkerLocal`. With another number of workers,
    floating-point leaves are averaged, and integers, booleans and keys are the first
    worker's.

    A worker may be several devices: `per_worker(optax.chain(exact_mean('device'),
    optax.adamw(1e-3)), 'host')` takes each host's steps by itself.

    Args:
      tx: any transformation. What it exchanges must be over other axes than `axis`.
      axis: name, or names, of the mesh axes whose members are the workers.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with each
      worker's own gradients. Its state is a `PerWorkerState`.

    Raises:
      TypeError: from `update`, for gradients that are not real floating-point.
      ValueError: from `init`, if it exchanges over `axis`. From `update`, if gradients
        are averaged already, an axis is not bound, or the state is one of other leaves
        or of another number of workers.

    Example:
      >>> import jax.numpy as jnp, onebit_jax, optax
      >>> tx = optax.chain(
      ...     per_worker(optax.trace(0.5), 'data'),
      ...     onebit_jax.exact_mean('data'),
      ...     optax.sgd(1.0),
      ... )
      >>> run = onebit_jax.simulated(lambda p, x: jnp.mean(x) * p, tx, workers=2)
      >>> params, state = run.init(jnp.float32(0))
      >>> params, state, loss = run.step(params, state, jnp.array([1.0, 3.0]))
      >>> print(params, state[0].inner.trace.value)
      -2.0 [1. 3.]
    """
    axes, inner = as_tuple(axis), optax.with_extra_args_support(tx)

    def init_fn(params: optax.Params) -> Any:
        state = inner.init(params)
        _check_other_axes(state, axes)
        return PerWorkerState(each_own(state, axes))

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        workers = bound_workers(axes)
        check_local(updates, axes, "per_worker")
        made = jax.eval_shape(lambda: each_own(inner.init(updates), axes))
        check_workers(_alike(state.inner, made), "per_worker", workers, axes)
        new_updates, own = inner.update(
            updates, this_worker(state.inner, axes), params, **extra_args
        )
        return new_updates, PerWorkerState(each_own(own, axes))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_other_axes(state: Any, axes: tuple[str, ...]) -> None:
    """Refuses what exchanges, or has worker-local state, over the same axes."""
    shared = {n for node in worker_local_nodes(state) for n in node.axes} & set(axes)
    if shared:
        raise ValueError(
            "inside per_worker and local_steps each worker is by itself, and this "
            f"optimizer exchanges, or has state of all workers, over {sorted(shared)}: "
            "give one without an exchange, such as optax.adamw, take optax.MultiSteps "
            "instead of accumulate, or let it exchange over other axes."
        )


def _alike(state: Any, made: Any) -> bool:
    """True of states of the same leaves, whatever their dtypes."""
    if jax.tree.structure(state) != jax.tree.structure(made):
        return False
    pairs = zip(*map(jax.tree.leaves, (state, made)), strict=True)
    return all(x.shape == y.shape for x, y in pairs)


def each_own(tree: Any, axes: tuple[str, ...]) -> Any:
    """A tree with each leaf in a `WorkerLocal`, as this worker's own.

    Outside of `shard_map` every worker is given the same.
    """
    _, slices = worker_count(axes)

    def own(x: Any) -> WorkerLocal:
        x = jnp.asarray(x)
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        value = jnp.broadcast_to(x[None], (slices, *x.shape))
        return WorkerLocal(value, axes, "average" if floating else "first")

    return jax.tree.map(own, to_varying(tree, axes))


def this_worker(tree: Any, axes: tuple[str, ...]) -> Any:
    """The inverse of `each_own`, inside `shard_map`."""
    return jax.tree.map(lambda node: node.value[0], tree, is_leaf=is_over(axes))
