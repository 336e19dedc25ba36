"""Data-parallel training with an exchange, in two functions."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from onebit_jax.step.checked import Step
from onebit_jax.step.checks import (
    check_batch,
    check_made_for,
    check_stage,
    check_workers_of,
)
from onebit_jax.step.local_gradients import local_value_and_grad
from onebit_jax.workers.arithmetic import mean, ordered_after
from onebit_jax.workers.axes import AxisNames, as_tuple
from onebit_jax.workers.placement import abstract_state, check_params, state_specs
from onebit_jax.workers.placement import init as init_state
from onebit_jax.workers.specs import is_spec, names_of
from onebit_jax.workers.states import is_local_stage, own_params
from onebit_jax.workers.worker_local import check_agreed, worker_local_nodes


class DataParallel(NamedTuple):
    """The two functions of `data_parallel`.

    Attributes:
      init: from parameters, the parameters and the optimizer's state on the mesh.
      step: a jitted function from parameters, state, batch and further arguments to
        new parameters, new state and loss, and with `has_aux` the auxiliary values as
        a fourth. Parameters and state are donated: their arrays are gone after the
        call, and the ones that it returns are to be used.
    """

    init: Callable[[Any], tuple[Any, Any]]
    step: Step


def data_parallel(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis: AxisNames | None = None,
    specs: Any = None,
    has_aux: bool = False,
) -> DataParallel:
    """Turns a loss function and an optimizer with an exchange into a training step.

    Every worker computes the loss and the gradients of its share of the batch; the
    optimizer exchanges what it must. Nothing else crosses the network but the mean
    of the loss and of the auxiliary values.

    Args:
      loss_fn: from parameters, a worker's share of the batch, and further arguments
        that are the same on all workers, to that worker's own loss, a scalar; or to
        the loss and a tree of arrays if `has_aux`, of which the means are taken. It
        may use `jax.lax.axis_index`: a random key among the arguments draws the same
        on all workers, unless the worker's number is folded in.
      tx: an optimizer that exchanges gradients or momentum by itself.
      mesh: the mesh.
      axis: names of the mesh axes whose members are the workers; None for all.
      specs: where parameters are sharded inside each worker: a tree of their
        structure with a `PartitionSpec` over the mesh's other axes for each, the one
        that `per_shard` is given; None for parameters that are sharded over none.
      has_aux: whether `loss_fn` returns auxiliary values.

    Returns:
      `init(params)`, which copies the parameters, and `step(params, state, batch,
      *args, stage=None, **extra)`, which returns `(params, state, loss)`, or with
      `has_aux` `(params, state, loss, aux)`, and donates the parameters and the state
      that it is given. Each leaf of the batch has the examples of all workers along its
      first axis; of several processes each makes its part of it, by
      `jax.make_array_from_process_local_data`. `stage` is static: the name of one of
      the optimizer's stages, which its state tells (`steps_by_stage`), compiles that
      one alone, if it can be the state's next. Of a stage in which workers take steps
      of their own nothing crosses the network: loss and auxiliary values are then each
      worker's own, along a first axis, until somebody takes their mean. Further
      arguments by name, the same on all workers, go to `tx.update`, such as the `value`
      of `optax.contrib.reduce_on_plateau`.

    Raises:
      ValueError: if the mesh lacks an axis, or `specs` is given and an axis of the
        mesh is explicit; from `init`, if the exchange works over other axes; from
        `step`, if the batch cannot be shared equally or is one of several processes'
        own, the state is one of other parameters or of another number of workers,
        parameters or state were donated before, the stage cannot be the next, the
        loss is averaged over the workers already, or an update passes
        through no exchange.
      TypeError: from `init`, if a random key or running statistics of Flax NNX are
        among the parameters; from `step`, if `loss_fn` returns a pair without
        `has_aux`, no pair with it, or a random key beside the loss.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax, optax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = optax.chain(onebit_jax.exact_mean('data'), optax.sgd(0.5))
      >>> run = data_parallel(lambda p, x: jnp.mean((p - x) ** 2) / 2, tx, mesh)
      >>> params, state = run.init(jnp.float32(0))
      >>> params, state, loss = run.step(params, state, jnp.ones(4))
      >>> print(params, loss)
      0.5 0.5
    """
    axes = as_tuple(mesh.axis_names if axis is None else axis)
    missing = [name for name in axes if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"the mesh has no axis {missing[0]!r}: its axes are {mesh.axis_names}."
        )
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in types if kind == AxisType.Explicit)
    if specs is not None and explicit:
        raise ValueError(
            f"specs need a mesh of automatic axes, and this one's {explicit} are "
            "explicit: make the mesh with AxisType.Auto."
        )
    run = _Run(loss_fn, optax.with_extra_args_support(tx), mesh, axes, specs, has_aux)
    processes = len({device.process_index for device in mesh.devices.flat})
    return DataParallel(run.init, Step(run.step, processes))


@dataclasses.dataclass(frozen=True)
class _Run:
    loss_fn: Callable[..., Any]
    tx: optax.GradientTransformationExtraArgs
    mesh: Mesh
    axes: tuple[str, ...]
    specs: Any
    has_aux: bool

    def init(self, params: Any) -> tuple[Any, Any]:
        """Copies of parameters, and the optimizer's state, on the mesh."""
        check_params(params)
        params = jax.tree.map(_copy, params, self.placed(params))
        state = init_state(self.tx, params, self.mesh)
        _check_axes(state, self.axes)
        _check_sharded(state, self.specs)
        return params, state

    def step(
        self,
        params: Any,
        state: Any,
        batch: Any,
        *args: Any,
        stage: str | None = None,
        **extra: Any,
    ) -> tuple[Any, ...]:
        """New parameters, new state, and the means of what the loss returns."""
        workers = math.prod(self.mesh.shape[name] for name in self.axes)
        check_batch(batch, workers, self.axes)
        check_workers_of(state, self.mesh.shape)
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        check_made_for(state, abstract_state(self.tx, shapes, self.mesh))
        check_stage(state, stage)
        split, everywhere = PartitionSpec(self.axes), PartitionSpec()
        of_values = split if is_local_stage(state, stage) else everywhere
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if any(types[name] == AxisType.Explicit for name in self.axes):
            batch = jax.reshard(batch, NamedSharding(self.mesh, split))
        specs_of_state = state_specs(state)
        params, state, *rest = jax.shard_map(
            functools.partial(
                local_step,
                self.loss_fn,
                self.tx,
                self.axes,
                self.has_aux,
                stage,
                is_local_stage(state, stage),
            ),
            mesh=self.mesh,
            in_specs=(
                everywhere,
                specs_of_state,
                everywhere,
                split,
                *(everywhere for _ in args),
            ),
            out_specs=(everywhere, specs_of_state, *[of_values] * (1 + self.has_aux)),
            axis_names=set(self.axes),
        )(params, state, extra, batch, *args)
        return *self.keep_placed(params, state), *rest

    def placed(self, params: Any) -> Any:
        """The shardings of parameters."""
        if self.specs is None:
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            return jax.tree.map(lambda _: everywhere, params)
        return jax.tree.map(
            lambda _, spec: NamedSharding(self.mesh, spec), params, self.specs
        )

    def keep_placed(self, params: Any, state: Any) -> tuple[Any, Any]:
        """Keeps parameters and state where they are, if specs were given."""
        if self.specs is None:
            return params, state
        # The compiler would choose shardings of its own for what a step returns.
        shardings = self.placed(params)
        shapes = jax.tree.map(
            lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s),
            params,
            shardings,
        )
        made = abstract_state(self.tx, shapes, self.mesh)
        constrain = jax.lax.with_sharding_constraint
        return constrain(params, shardings), jax.tree.map(
            lambda x, shape: constrain(x, shape.sharding), state, made
        )


def local_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformationExtraArgs,
    axes: tuple[str, ...],
    has_aux: bool,
    stage: str | None,
    is_local: bool,
    params: Any,
    state: Any,
    extra: dict[str, Any],
    batch: Any,
    *args: Any,
) -> tuple[Any, ...]:
    """The step of one worker, where its axes are bound."""
    value_and_grad = local_value_and_grad(loss_fn, axes, has_aux=has_aux)
    value, gradients = value_and_grad(own_params(params, state), batch, *args)
    if stage is not None:
        extra = {**extra, "stage": stage}
    updates, state = tx.update(gradients, state, params, **extra)
    check_agreed(updates, state, axes)
    params = optax.apply_updates(params, updates)
    values = jax.tree.map_with_path(_as_float, value)
    if is_local:
        values = jax.tree.map(lambda x: x[None], values)
    else:
        if stage is None:
            # A program of one stage has them in an all-reduce that it makes anyway.
            values = jax.tree.map(lambda x: ordered_after(x, updates), values)
        values = jax.tree.map(lambda x: mean(x, axes), values)
    return params, state, *(values if has_aux else (values,))


def _copy(x: Any, sharding: NamedSharding) -> Any:
    # A copy: step donates its arguments, and the caller keeps the parameters.
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=sharding)(x)
    # From the host, as a process's own array may be known to no other process.
    return jax.device_put(np.asarray(x), sharding)


def _check_axes(state: Any, axes: tuple[str, ...]) -> None:
    named = {name for node in worker_local_nodes(state) for name in node.axes}
    if named and named != set(axes):
        raise ValueError(
            f"the batch is divided over {axes} and the optimizer's exchange works over "
            f"{tuple(sorted(named))}: name the same axes in data_parallel(axis=...) "
            "and in the exchange."
        )


def _check_sharded(state: Any, specs: Any) -> None:
    """Refuses specs that were given to the step or to the exchange alone."""
    has_shards = has_whole = False
    for node in worker_local_nodes(state):
        named = {name for spec in node.specs or () for name in names_of(spec)}
        has_shards |= bool(named - set(node.axes))
        per_shard = node.shard_axes and node.leading_axes() == node.axes
        has_whole |= node.resizing == "concatenate" and not per_shard
    sharded = any(names_of(spec) for spec in jax.tree.leaves(specs, is_leaf=is_spec))
    if (sharded and has_whole) or (has_shards and specs is None):
        raise ValueError(
            "where parameters are sharded inside each worker, every exchange must be "
            "per_shard(exchange, specs), that of whole parameters too, with the specs "
            "that data_parallel(specs=specs) is given."
        )


def _as_float(path: Any, x: Any) -> jax.Array:
    # The mean of integers is not an integer, and their sum may overflow.
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"the auxiliary value {jax.tree_util.keystr(path[1:]) or 'itself'} is a "
            "random key, of which there is no mean over the workers: return no keys "
            "beside the loss, and pass each step's own to run.step."
        )
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
