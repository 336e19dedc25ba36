"""A training step of one's own, run by every worker at once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from onebit_jax.step.checked import Step, each_once
from onebit_jax.step.checks import check_axes, check_batch, check_workers_of
from onebit_jax.step.data_parallel import on_workers, workers_of
from onebit_jax.step.placed import on_mesh, placed_on
from onebit_jax.step.statics import (
    CountsError,
    Static,
    arrays_alone,
    by_name,
    check_counts,
    with_leaves,
)
from onebit_jax.workers.axes import AxisNames, varying_axes
from onebit_jax.workers.placement import state_specs
from onebit_jax.workers.processes import processes_of
from onebit_jax.workers.specs import over, spec_of
from onebit_jax.workers.states import is_local_stage
from onebit_jax.workers.worker_local import is_worker_local


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
        `step(params, state, batch)`, 1 of `step(train_state, batch)`. They are any
        trees; what is no array in them, as the functions and flags of an Equinox
        module, stays what it is.
      check_vma: whether types record what is the same on all workers, so that
        gradients that are averaged already, and what differs and must not, are
        refused. A carry of `jax.lax.scan` that begins with zeros must then be made to
        vary, `jax.lax.pcast(zeros, axis, to='varying')`.

    Returns:
      A decorator. What it makes is called with three kinds of arguments.

      First what is carried, which is donated; the optimizer's state is that of
      `onebit_jax.init(tx, params, mesh)`. Then batches, whose leaves have the examples
      of all workers along their first axis. By name what is the same on all workers,
      such as a random key.

      Arrays and numbers by name are traced, those in a tree too. All else is compiled
      in, as `train=True`, a function or a frozen dataclass, and must be hashable. A
      tree of numbers, as a `flax.struct.dataclass` is, is bound before the step is
      decorated: `functools.partial(step, config=config)`. `stage`, by name, is that of
      the optimizer, and must be a name of the step's own arguments.

      It returns what the step does: what is carried, and the means over the workers of
      all else. In a stage of steps of the workers' own these are each worker's, along a
      first axis.

    Raises:
      ValueError: if the mesh lacks an axis. From a call, if batches cannot be shared
        equally, or the stage cannot be the next. From a call, if what is carried was
        donated before, differs from worker to worker, or is sharded over the workers'
        axes. From a call, if the state is one of other workers or axes, or of
        parameters that were not sharded. From a call, if processes hold other values or
        run another program.
      TypeError: if no mesh is given. From a call, if the step does not return what is
        carried.

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
    if not isinstance(mesh, Mesh):
        raise TypeError(
            "worker_step is given the mesh, and makes a decorator: write "
            f"@worker_step(mesh, axis) above the step, got {mesh!r}."
        )
    axes = workers_of(mesh, axis)

    def decorate(step: Callable[..., Any]) -> WorkerStep:
        kinds = inspect.signature(step).parameters.values()
        names = [p.name for p in kinds if p.kind in (p.POSITIONAL_ONLY, _POSITIONAL)]
        names = (*names, *(f"argument {i}" for i in range(len(names), carried)))
        each = _OfWorkers(step, mesh, axes, carried, check_vma)
        checked = Step(each.step, processes_of(mesh), names[:carried], None)
        return WorkerStep(checked, mesh, axes, carried)

    return decorate


_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


class WorkerStep:
    """A step of one's own, run by every worker.

    Args:
      step: the step, checked and jitted.
      mesh: the mesh.
      axes: the axes of the workers.
      carried: how many of its first arguments are returned anew.
    """

    def __init__(self, step: Step, mesh: Mesh, axes: tuple[str, ...], carried: int):
        self.checked = step
        self._mesh, self._axes, self._carried = mesh, axes, carried
        # The first arrays of what it returned last, and where they all were.
        self._last: tuple[Callable[[], Any], ...] = ()
        self._placed = Static(())
        # Python's integers that the step changes, by their places.
        self._counts: frozenset[int] = frozenset()

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Runs the step; see `worker_step`."""
        return self._counting(self._run, *args, **options)

    def lower(self, *args: Any, **options: Any) -> Any:
        """As of a function that `jax.jit` returns."""

        def lower(*args: Any, **options: Any) -> Any:
            return self.checked.lower(*self._given(args, options), **by_name(options))

        return self._counting(lower, *args, **options)

    def _counting(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Runs it again if the step turns out to change an integer of Python's.

        The count of a TrainState begins as 0, and comes back as an array; the sizes in
        a module stay numbers.
        """
        while True:
            try:
                return run(*args, **options)
            except CountsError as error:
                # One count may be made from another.
                self._counts |= error.places

    def _run(self, *args: Any, **options: Any) -> Any:
        *given, placed = self._given(args, options)
        result = self.checked(*given, placed, **by_name(options))
        self._last = tuple(map(weakref.ref, jax.tree.leaves(result[: self._carried])))
        self._placed = placed
        return with_leaves(result)

    def _given(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments on the mesh, and where the compiler must leave them."""
        if len(args) < self._carried:
            raise TypeError(
                f"pass the {self._carried} arguments that are carried, and the batches "
                "after them, by position: a name is for what is no list of examples."
            )
        batches = args[self._carried :]
        carried = arrays_alone(args[: self._carried], self._counts)
        # What it returned is in place.
        leaves = jax.tree.leaves(carried)
        if len(leaves) == len(self._last) and all(
            x is last() for x, last in zip(leaves, self._last, strict=True)
        ):
            return (*carried, *batches, self._placed)
        # Before they are placed: two arrays may have one buffer then.
        carried = each_once(carried, leaves, (batches, options))
        carried = on_mesh(carried, self._mesh, self._axes)
        placed = map(functools.partial(placed_on, self._mesh), jax.tree.leaves(carried))
        return (*carried, *batches, Static(tuple(placed)))


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
        **same: Any,
    ) -> tuple[Any, ...]:
        """The carried trees anew, and the means of what the step tells besides."""
        carried, (*batches, placed) = args[: self.carried], args[self.carried :]
        batches = tuple(batches)
        workers = math.prod(self.mesh.shape[name] for name in self.axes)
        examples = batches[0] if len(batches) == 1 else batches
        check_batch(examples, workers, self.axes, "to the step by name")
        check_workers_of(carried, self.mesh.shape)
        check_axes(carried, self.axes, "worker_step(mesh, axis)")
        carried, values = on_workers(
            functools.partial(self.local, stage),
            self.mesh,
            self.axes,
            carried,
            same,
            batches,
            specs=state_specs(carried),
            kept=jax.tree.map(lambda x: spec_of(jax.typeof(x)), carried),
            stage=stage,
            is_local=is_local_stage(carried, stage),
            check_vma=self.check_vma,
        )
        return *self.kept(carried, placed.value), *values

    def local(
        self,
        stage: str | None,
        carried: tuple[Any, ...],
        same: dict[str, Any],
        batches: tuple[Any, ...],
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], list[Any]]:
        """The step of one worker, where its axes are bound."""
        if stage is not None:
            same = {**same, "stage": stage}
        result = self.function(*with_leaves(carried), *batches, **with_leaves(same))
        if self.carried == 1 and type(result) is not tuple:
            result = (result,)
        anew, values = arrays_alone(result[: self.carried]), result[self.carried :]
        check_counts(carried, anew)
        if jax.tree.structure(anew) != jax.tree.structure(carried):
            raise TypeError(
                f"the step must return its first {self.carried} arguments anew, in "
                "trees like theirs, and then what it tells, as in return params, "
                f"state, loss; it returned {jax.tree.structure(result)}."
            )
        _check_carried(anew, self.axes)
        agreed = [
            x
            for x in jax.tree.leaves(anew, is_leaf=is_worker_local)
            if not is_worker_local(x) and jnp.issubdtype(x.dtype, jnp.floating)
        ]
        return anew, values, agreed

    def kept(self, carried: Any, placed: tuple[NamedSharding | None, ...]) -> Any:
        """The carried trees where they were; the compiler would choose other places."""
        automatic = set(self.mesh.abstract_mesh.auto_axes)
        if not placed or not automatic - set(self.axes):
            return carried
        leaves, treedef = jax.tree.flatten(carried)
        return treedef.unflatten(
            [
                x
                if at is None
                else jax.lax.with_sharding_constraint(
                    x,
                    NamedSharding(
                        self.mesh, over(automatic, at.spec), memory_kind=at.memory_kind
                    ),
                )
                for x, at in zip(leaves, placed, strict=True)
            ]
        )


def _check_carried(anew: Any, axes: tuple[str, ...]) -> None:
    """Refuses what the step returns if it differs between workers and must not."""
    for (first, *path), x in jax.tree.leaves_with_path(anew, is_leaf=is_worker_local):
        if not is_worker_local(x) and set(axes) & varying_axes(x):
            name = f"result {first.idx}{jax.tree_util.keystr(tuple(path))}"
            raise ValueError(
                f"the step's {name} differs from worker to worker: either gradients "
                "pass through no exchange before it, as onebit_jax.exact_mean"
                f"({axes}), or it is learnt beside them, as statistics are, and the "
                f"step must return its mean, jax.lax.pmean(x, {axes}), or it is a sum "
                "of gradients, which onebit_jax.accumulate keeps."
            )
