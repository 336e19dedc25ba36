"""Data-parallel training with an exchange, in two functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from onebit_jax.step.checked import Step
from onebit_jax.step.checks import check_axes, check_given
from onebit_jax.step.local_gradients import local_value_and_grad
from onebit_jax.step.placed import check_sharded, copied, spec_inside, specs_inside
from onebit_jax.workers.arithmetic import mean, ordered_after
from onebit_jax.workers.axes import AxisNames, as_tuple, is_agreed
from onebit_jax.workers.placement import abstract_state, check_params, state_specs
from onebit_jax.workers.placement import init as init_state
from onebit_jax.workers.processes import check_same, processes_of
from onebit_jax.workers.specs import (
    entry_names,
    is_spec,
    names_of,
    sharding_of,
    spec_of,
)
from onebit_jax.workers.states import is_local_stage, own_params
from onebit_jax.workers.worker_local import check_agreed


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
      loss_fn: from parameters, a worker's share of the batch and further arguments, the
        same on all workers, to that worker's own loss. With `has_aux`, to the loss and
        a tree of arrays, of which the means are taken. It may use `jax.lax.axis_index`.
        A random key among the arguments draws the same on all workers, unless the
        worker's number is folded in.
      tx: an optimizer that exchanges gradients or momentum by itself.
      mesh: the mesh.
      axis: names of the mesh axes whose members are the workers; None for all.
      specs: how to shard parameters inside each worker. A tree of their structure with
        a `PartitionSpec` over the mesh's other axes for each. None keeps them as they
        are sharded.
      has_aux: whether `loss_fn` returns auxiliary values.

    Returns:
      `init(params)`, which copies the parameters, and `step(params, state, batch,
      *args, stage=None, **extra)`. It returns `(params, state, loss)`, or with
      `has_aux` `(params, state, loss, aux)`, and donates the parameters and the state
      that it is given.

      Each leaf of the batch has the examples of all workers along its first axis. Of
      several processes each makes its part of it, by
      `jax.make_array_from_process_local_data`.

      `stage` is static: the name of one of the optimizer's stages, which its state
      tells (`steps_by_stage`). It compiles that one alone, if it can be the state's
      next. In a stage in which workers take steps of their own nothing crosses the
      network. Loss and auxiliary values are then each worker's own, along a first axis.

      Further arguments by name, the same on all workers, go to `tx.update`, such as the
      `value` of `optax.contrib.reduce_on_plateau`.

    Raises:
      ValueError: if the mesh lacks an axis. From `init`, if the exchange works over
        other axes, or processes hold other parameters. From `init`, if parameters are
        sharded over the workers' axes or another mesh, or so that an exchange does not
        see it. From `step`, if the batch cannot be shared equally, or is one of several
        processes' own. From `step`, if processes differ in parameters, state or further
        arguments, or these were donated before. From `step`, if the state is one of
        other parameters or workers, or the stage cannot be the next. From `step`, if
        the loss is averaged over the workers, or an update passes through no exchange.
      TypeError: from `init`, if a random key or running statistics of Flax NNX are
        among the parameters. From `step`, if what `loss_fn` returns is no pair with
        `has_aux`, a pair without it, or holds a random key.

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
    axes = workers_of(mesh, axis)
    run = _Run(loss_fn, optax.with_extra_args_support(tx), mesh, axes, specs, has_aux)
    return DataParallel(run.init, Step(run.step, processes_of(mesh)))


def workers_of(mesh: Mesh, axis: AxisNames | None) -> tuple[str, ...]:
    """The axes whose members are the workers: those named, or all."""
    axes = as_tuple(mesh.axis_names if axis is None else axis)
    missing = [name for name in axes if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"the mesh has no axis {missing[0]!r}: its axes are {mesh.axis_names}."
        )
    return axes


_Function = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


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
        check_same({"params": params}, processes_of(self.mesh))
        specs = self.specs
        if specs is None:
            inside = functools.partial(spec_inside, self.mesh, self.axes)
            specs = jax.tree.map_with_path(inside, params)
        params = jax.tree.map(copied, params, self.placed(params, specs))
        state = init_state(self.tx, params, self.mesh)
        check_axes(state, self.axes, "data_parallel(axis=...)")
        check_sharded(params, specs, state)
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
        specs = specs_inside(params, state)
        shapes = jax.tree.map(_shape_of, params, self.placed(params, specs))
        made = abstract_state(self.tx, shapes, self.mesh)
        check_given(batch, state, made, stage, self.axes, self.mesh.shape)
        (params, state), values = on_workers(
            functools.partial(
                local_step,
                self.explicit_loss(specs, (batch, *args)),
                self.tx,
                self.axes,
                self.has_aux,
                stage,
            ),
            self.mesh,
            self.axes,
            (params, state),
            (extra, args),
            batch,
            specs=(PartitionSpec(), state_specs(state)),
            kept=(specs, jax.tree.map(spec_of, made)),
            stage=stage,
            is_local=is_local_stage(state, stage),
        )
        if any(map(names_of, jax.tree.leaves(specs, is_leaf=is_spec))):
            params, state = self.keep_placed(params, state, shapes, made)
        return params, state, *values

    def explicit_loss(self, specs: Any, given: tuple[Any, ...]) -> Callable[..., Any]:
        """The loss, which sees the explicit axes inside a worker."""
        inside = _explicit_inside(self.mesh, self.axes)
        if not inside:
            return self.loss_fn
        # What is around it must not: shard_map gathers what is divided over explicit
        # axes (jax 0.10 to 0.12).
        divided = jax.tree.map(functools.partial(_spec_inside, inside), given)
        return jax.sharding.explicit_axes(
            self.loss_fn, axes=inside, in_sharding=(specs, *divided)
        )

    def placed(self, params: Any, specs: Any) -> Any:
        """The shardings of parameters."""
        return jax.tree.map(
            lambda p, spec: sharding_of(self.mesh, spec, p.ndim), params, specs
        )

    def keep_placed(
        self, params: Any, state: Any, shapes: Any, made: Any
    ) -> tuple[Any, Any]:
        """Keeps sharded parameters, and the state with them, where they are."""
        if self.mesh.abstract_mesh.explicit_axes:
            return params, state

        # The compiler would choose shardings of its own for what a step returns.
        def keep(x: Any, shape: Any) -> Any:
            return jax.lax.with_sharding_constraint(x, shape.sharding)

        return jax.tree.map(keep, (params, state), (shapes, made))


def _spec_inside(axes: tuple[str, ...], x: Any) -> PartitionSpec:
    """The partition of a value over the axes inside a worker."""
    names = [entry_names(entry) for entry in spec_of(jax.typeof(x))]
    return PartitionSpec(*(tuple(n for n in each if n in axes) for each in names))


def _shape_of(p: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding)


def on_workers(
    function: _Function,
    mesh: Mesh,
    axes: tuple[str, ...],
    carried: Any,
    same: Any,
    batches: Any,
    *,
    specs: Any,
    kept: Any,
    stage: str | None,
    is_local: bool,
    check_vma: bool = True,
) -> tuple[Any, Any]:
    """Runs a function on every worker, inside `jax.shard_map`.

    Args:
      function: as of `of_worker`.
      mesh: the mesh.
      axes: the axes of the workers; the mesh's others stay with the compiler.
      carried: trees.
      same: a tree that is the same on all workers.
      batches: a tree whose leaves have the examples of all workers.
      specs: the partition over the workers of each leaf of what is carried.
      kept: its partition over explicit axes inside a worker, which it is to keep.
      stage: as of `of_worker`.
      is_local: as of `of_worker`.
      check_vma: as of `jax.shard_map`.

    Returns:
      What is carried anew, and the values, along a first axis where they are each
      worker's.
    """
    inside = _explicit_inside(mesh, axes)
    if set(axes) & set(mesh.abstract_mesh.explicit_axes):
        batches = jax.tree.map(functools.partial(_divided, mesh, axes), batches)
    everywhere, split = PartitionSpec(), PartitionSpec(axes)
    of_values = split if is_local else everywhere
    run: Any = jax.shard_map(
        of_worker(function, axes, stage, is_local),
        mesh=None if inside else mesh,
        in_specs=(specs, everywhere, split),
        out_specs=(specs, of_values),
        axis_names=set(axes),
        check_vma=check_vma,
    )
    if inside:
        run = jax.sharding.auto_axes(run, axes=inside, out_sharding=(kept, of_values))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return run(carried, same, batches)


def of_worker(
    function: _Function, axes: tuple[str, ...], stage: str | None, is_local: bool
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """A function of each worker where its axes are bound, and the means after it.

    Args:
      function: from what is carried, what is the same on all workers and a worker's
        share of the batches, to what is carried anew, values, and a tree that all
        workers agree on, before which no value is sent.
      axes: the axes of the workers.
      stage: the only one of the program; None for a program of all.
      is_local: whether nothing is exchanged, so that values are each worker's.

    Returns:
      A function to what is carried anew, and the means of the values or, along a first
      axis, this worker's.
    """

    def run(carried: Any, same: Any, batches: Any) -> tuple[Any, Any]:
        anew, values, agreed = function(carried, same, batches)

        def told(path: Any, x: Any) -> Any:
            # What is the same on all workers, as a count of steps, stays what it is.
            if not is_local and is_agreed(x, axes):
                return x
            x = _as_float(path, x)
            if is_local:
                return x[None]
            # A program of one stage has them in an all-reduce that it makes anyway.
            return mean(ordered_after(x, agreed) if stage is None else x, axes)

        return anew, jax.tree.map_with_path(told, values)

    return run


def local_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformationExtraArgs,
    axes: tuple[str, ...],
    has_aux: bool,
    stage: str | None,
    carried: tuple[Any, Any],
    same: tuple[dict[str, Any], tuple[Any, ...]],
    batch: Any,
) -> tuple[tuple[Any, Any], tuple[Any, ...], Any]:
    """The step of one worker, where its axes are bound."""
    (params, state), (extra, args) = carried, same
    value_and_grad = local_value_and_grad(loss_fn, axes, has_aux=has_aux)
    value, gradients = value_and_grad(own_params(params, state), batch, *args)
    if stage is not None:
        extra = {**extra, "stage": stage}
    updates, state = tx.update(gradients, state, params, **extra)
    check_agreed(updates, state, axes)
    params = optax.apply_updates(params, updates)
    # Floats, also of integers that are the same on all workers.
    value = jax.tree.map_with_path(_as_float, value)
    return (params, state), value if has_aux else (value,), updates


def _explicit_inside(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The explicit axes of a mesh that are not the workers'."""
    return tuple(set(mesh.abstract_mesh.explicit_axes) - set(axes))


def _divided(mesh: Mesh, axes: tuple[str, ...], x: Any) -> Any:
    """Examples divided over the workers, and as they are inside each."""
    given = (*map(entry_names, spec_of(jax.typeof(x))), ())
    first, *rest = (tuple(n for n in names if n not in axes) for names in given)
    spec = PartitionSpec((*axes, *first), *rest[: x.ndim - 1])
    return jax.reshard(x, NamedSharding(mesh, spec))


def _as_float(path: Any, x: Any) -> jax.Array:
    """An auxiliary value of which a mean can be taken."""
    # The mean of integers is not an integer, and their sum may overflow.
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"the auxiliary value {jax.tree_util.keystr(path[1:]) or 'itself'} is a "
            "random key, of which there is no mean over the workers: return no keys "
            "beside the loss, and pass each step's own to run.step."
        )
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
