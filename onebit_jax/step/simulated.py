"""Data-parallel training with workers that one device simulates."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from onebit_jax.step.checked import Step
from onebit_jax.step.checks import check_given
from onebit_jax.step.data_parallel import DataParallel, local_step, of_worker
from onebit_jax.workers.chains import check_wrappers
from onebit_jax.workers.placement import check_params, state_specs
from onebit_jax.workers.states import is_local_stage
from onebit_jax.workers.worker_local import is_worker_local

if TYPE_CHECKING:
    from collections.abc import Callable


def simulated(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    workers: int,
    *,
    axis: str = "data",
    has_aux: bool = False,
) -> DataParallel:
    """The training step of `data_parallel`, its workers simulated on one device.

    For experiments: what an optimizer learns with 8 or with 512 workers does not depend
    on where they are. It is `jax.vmap` over the workers, so that no collective is left;
    errors of all workers are on the one device.

    Args:
      loss_fn: as of `data_parallel`.
      tx: an optimizer whose exchange works over `axis`.
      workers: how many are simulated.
      axis: the name of the axis whose members they are.
      has_aux: as of `data_parallel`.

    Returns:
      `init(params)` and `step(params, state, batch, *args, stage=None, **extra)` as
      of `data_parallel`, whose state has the shapes of a mesh of so many devices.

    Raises:
      TypeError, ValueError: from `init`, as `onebit_jax.init` for the parameters.
      ValueError: from `step`, if the batch cannot be shared equally, or as that of
        `data_parallel`.

    Example:
      >>> import jax.numpy as jnp, onebit_jax, optax
      >>> tx = optax.chain(onebit_jax.exact_mean('data'), optax.sgd(0.5))
      >>> run = simulated(lambda p, x: jnp.mean((p - x) ** 2) / 2, tx, workers=4)
      >>> params, state = run.init(jnp.float32(0))
      >>> params, state, loss = run.step(params, state, jnp.arange(8.0))
      >>> print(params, loss)
      1.75 8.75
    """
    transformation = optax.with_extra_args_support(tx)
    over_workers = functools.partial(jax.vmap, axis_name=axis, axis_size=workers)

    def state_of(params: Any) -> Any:
        make = functools.partial(over_workers, tx.init, in_axes=None)
        shapes = jax.eval_shape(make(out_axes=0), params)
        return _merged(jax.jit(make(out_axes=_local_axes(shapes)))(params))

    def init(params: Any) -> tuple[Any, Any]:
        check_params(params)
        params = jax.tree.map(jnp.array, params)
        shapes = jax.eval_shape(state_of, params)
        check_wrappers(shapes)
        return params, state_of(params)

    def step(
        params: Any,
        state: Any,
        batch: Any,
        *args: Any,
        stage: str | None = None,
        **extra: Any,
    ) -> tuple[Any, ...]:
        made = jax.eval_shape(state_of, params)
        check_given(batch, state, made, stage, (axis,), {axis: workers})
        local = is_local_stage(state, stage)
        one = of_worker(
            functools.partial(
                local_step, loss_fn, transformation, (axis,), has_aux, stage
            ),
            (axis,),
            stage,
            local,
        )
        axes = None, _local_axes(state)
        over = over_workers(
            one, in_axes=(axes, None, 0), out_axes=(axes, 0 if local else None)
        )
        carried, same = (params, _split(state, workers)), (extra, args)
        try:
            (params, state), rest = over(carried, same, _divided(batch, workers))
        except ValueError:
            _explain(one, workers, axis, (params, state), same, batch)
            raise
        if local:
            rest = [jax.tree.map(lambda x: x[:, 0], each) for each in rest]
        return params, _merged(state), *rest

    return DataParallel(init, Step(step))


def _explain(
    step: Callable[..., Any], workers: int, axis: str, carried: Any, *given: Any
) -> None:
    """Raises the error of `data_parallel`, if it has one for the same step.

    `jax.vmap` does not say which value differs from worker to worker. Types on a mesh
    do, and tracing needs none of its devices.
    """
    everywhere, specs = PartitionSpec(), state_specs(carried[1])
    on_mesh = jax.shard_map(
        lambda *given: step(*given)[0][1],
        mesh=AbstractMesh((workers,), (axis,), axis_types=(AxisType.Auto,)),
        in_specs=((everywhere, specs), everywhere, PartitionSpec(axis)),
        out_specs=specs,
    )
    jax.eval_shape(on_mesh, carried, *given)


def _local_axes(state: Any) -> Any:
    """The axes for `jax.vmap`: the first of what is worker-local."""
    return jax.tree.map(
        lambda node: jax.tree.map(lambda _: 0, node) if is_worker_local(node) else None,
        state,
        is_leaf=is_worker_local,
    )


def _divided(tree: Any, workers: int) -> Any:
    return jax.tree.map(
        lambda x: x.reshape(workers, x.shape[0] // workers, *x.shape[1:]), tree
    )


def _split(state: Any, workers: int) -> Any:
    """Worker-local arrays (workers, ...) as (workers, 1, ...)."""
    return jax.tree.map(
        lambda node: _divided(node, workers) if is_worker_local(node) else node,
        state,
        is_leaf=is_worker_local,
    )


def _merged(state: Any) -> Any:
    """The inverse of `_split`."""

    def merged(node: Any) -> Any:
        if not is_worker_local(node):
            return node
        return jax.tree.map(
            lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), node
        )

    return jax.tree.map(merged, state, is_leaf=is_worker_local)
