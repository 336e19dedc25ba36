"""A training step of one's own, run by every worker at once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from onebit_jax.step.checked import Step
from onebit_jax.step.checks import check_batch, check_workers_of
from onebit_jax.step.data_parallel import as_float, divided, workers_of
from onebit_jax.workers.arithmetic import mean, ordered_after
from onebit_jax.workers.axes import AxisNames, is_agreed
from onebit_jax.workers.placement import state_specs
from onebit_jax.workers.processes import processes_of
from onebit_jax.workers.specs import names_of, spec_of
from onebit_jax.workers.states import is_local_stage
from onebit_jax.workers.worker_local import check_agreed, is_worker_local


def worker_step(
    mesh: Mesh,
    axis: AxisNames | None = None,
    *,
    carried: int = 2,
    check_vma: bool = True,
) -> Callable[[Callable[..., Any]], WorkerStep]:
    """Runs a training step of one's own on every worker, as a decorator.

    For who writes the step: a model that `jax.jit` shards, a TrainState, gradients
    accumulated in a scan. Each worker is given its share of the batch. It takes its own
    gradients by `local_value_and_grad`, and gives them to the optimizer, which
    exchanges what it must.

    The mesh's other axes stay with the compiler inside the step, so that constraints
    over them, and shardings of parameters and state, are kept. Of axes that are
    explicit the step sees automatic ones: put what asks for explicit types into
    `jax.sharding.explicit_axes`.

    Args:
      mesh: the mesh.
      axis: names of the mesh axes whose members are the workers; None for all.
      carried: how many of the first arguments the step returns anew, such as 2 of
        `step(params, state, batch)`, 1 of `step(train_state, batch)`.
      check_vma: whether types record what is the same on all workers, so that
        gradients that are averaged already, and what differs and must not, are
        refused. A carry of `jax.lax.scan` that begins with zeros must then be made to
        vary, `jax.lax.pcast(zeros, axis, to='varying')`.

    Returns:
      A decorator. What it makes is called with what is carried, which is donated (the
      optimizer's state from `onebit_jax.init(tx, params, mesh)`); with batches, whose
      leaves have the examples of all workers along their first axis; and by name with
      what is the same on all workers, such as a random key. `stage`, by name, is
      static, and must be a name of the step's own arguments. It returns what the step
      does: what is carried, and the means over the workers of what stands behind it;
      in a stage of steps of the workers' own these are each worker's, along a first
      axis.

    Raises:
      ValueError: if the mesh lacks an axis; from a call, if a batch cannot be shared
        equally, what is carried was donated before or differs from worker to worker,
        the state is one of another number of workers, processes hold other values or
        run another program, or the stage cannot be the next.
      TypeError: from a call, if the step does not return what is carried.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax, optax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = optax.chain(onebit_jax.exact_mean('data'), optax.sgd(0.5))
      >>> @worker_step(mesh, 'data')
      ... def step(params, state, x):
      ...     def loss_fn(p):
      ...         return jnp.mean((p - x) ** 2) / 2
      ...     value_and_grad = onebit_jax.local_value_and_grad(loss_fn, 'data')
      ...     loss, gradients = value_and_grad(params)
      ...     updates, state = tx.update(gradients, state, params)
      ...     return optax.apply_updates(params, updates), state, loss
      >>> params = jnp.float32(0)
      >>> state = onebit_jax.init(tx, params, mesh)
      >>> params, state, loss = step(params, state, jnp.ones(4))
      >>> print(params, loss)
      0.5 0.5
    """
    axes = workers_of(mesh, axis)

    def decorate(step: Callable[..., Any]) -> WorkerStep:
        names = tuple(inspect.signature(step).parameters)[:carried]
        each = _OfWorkers(step, mesh, axes, carried, check_vma)
        static = ("stage", "placed")
        checked = Step(each.step, processes_of(mesh), names, None, static)
        return WorkerStep(checked, mesh)

    return decorate


class WorkerStep:
    """What `worker_step` makes of a step.

    Args:
      step: the step, checked and jitted.
      mesh: the mesh.
    """

    def __init__(self, step: Step, mesh: Mesh):
        self.checked = step
        self._mesh = mesh

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Runs the step; see `worker_step`."""
        return self.checked(*args, placed=self._placed(args), **options)

    def lower(self, *args: Any, **options: Any) -> Any:
        """As of a function that `jax.jit` returns."""
        return self.checked.lower(*args, placed=self._placed(args), **options)

    def _placed(self, args: tuple[Any, ...]) -> tuple[NamedSharding | None, ...]:
        """Where the compiler's choice must leave what is carried, leaf by leaf."""

        def of_leaf(x: Any) -> NamedSharding | None:
            sharding = getattr(x, "sharding", None)
            if not isinstance(sharding, NamedSharding) or sharding.mesh != self._mesh:
                return None
            return sharding if names_of(sharding.spec) else None

        return tuple(map(of_leaf, jax.tree.leaves(args)))


@dataclasses.dataclass(frozen=True)
class _OfWorkers:
    function: Callable[..., Any]
    mesh: Mesh
    axes: tuple[str, ...]
    carried: int
    check_vma: bool

    def step(
        self,
        *args: Any,
        stage: str | None = None,
        placed: tuple[NamedSharding | None, ...] = (),
        **same: Any,
    ) -> tuple[Any, ...]:
        """What is carried anew, and the means of what the step tells besides."""
        carried, batches = args[: self.carried], args[self.carried :]
        workers = math.prod(self.mesh.shape[name] for name in self.axes)
        for batch in batches:
            check_batch(batch, workers, self.axes, "to the step by name")
        check_workers_of(carried, self.mesh.shape)
        is_local = is_local_stage(carried, stage)
        split, everywhere = PartitionSpec(self.axes), PartitionSpec()
        of_values = split if is_local else everywhere
        explicit = set(self.mesh.abstract_mesh.explicit_axes)
        if explicit & set(self.axes):
            divide = functools.partial(divided, self.mesh, self.axes)
            batches = jax.tree.map(divide, batches)
        inside = tuple(explicit - set(self.axes))
        specs = state_specs(carried)
        step: Any = jax.shard_map(
            functools.partial(self.local, stage, is_local),
            mesh=None if inside else self.mesh,
            in_specs=(specs, everywhere, split),
            out_specs=(specs, of_values),
            axis_names=set(self.axes),
            check_vma=self.check_vma,
        )
        if inside:
            kept = jax.tree.map(lambda x: spec_of(jax.typeof(x)), carried)
            step = jax.sharding.auto_axes(
                step, axes=inside, out_sharding=(kept, of_values)
            )
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            carried, values = step(carried, same, batches)
        return *self.kept(carried, placed), *values

    def local(
        self,
        stage: str | None,
        is_local: bool,
        carried: tuple[Any, ...],
        same: dict[str, Any],
        batches: tuple[Any, ...],
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The step of one worker, where its axes are bound."""
        if stage is not None:
            same = {**same, "stage": stage}
        result = self.function(*carried, *batches, **same)
        if self.carried == 1 and type(result) is not tuple:
            result = (result,)
        anew, values = result[: self.carried], result[self.carried :]
        if jax.tree.structure(anew) != jax.tree.structure(carried):
            raise TypeError(
                f"the step must return its first {self.carried} arguments anew, in "
                "trees like theirs, and then what it tells, as in return params, "
                f"state, loss; it returned {jax.tree.structure(result)}."
            )
        check_agreed(anew, (), self.axes)
        values = jax.tree.map_with_path(as_float, values)
        if is_local:
            return anew, jax.tree.map(lambda x: x[None], values)
        agreed = [
            x
            for x in jax.tree.leaves(anew, is_leaf=is_worker_local)
            if not is_worker_local(x) and jnp.issubdtype(x.dtype, jnp.floating)
        ]

        def of_all(x: jax.Array) -> jax.Array:
            if is_agreed(x, self.axes):
                return x
            return mean(ordered_after(x, agreed), self.axes)

        return anew, jax.tree.map(of_all, values)

    def kept(self, carried: Any, placed: tuple[NamedSharding | None, ...]) -> Any:
        """What is carried, where it was; the compiler would choose other places."""
        automatic = set(self.mesh.abstract_mesh.auto_axes) - set(self.axes)
        if not placed or not automatic:
            return carried
        leaves, treedef = jax.tree.flatten(carried)
        return treedef.unflatten(
            [
                x if at is None else jax.lax.with_sharding_constraint(x, at)
                for x, at in zip(leaves, placed, strict=False)
            ]
        )
