"""A jitted step that checks its arguments before it runs."""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils

from onebit_jax.step.checks import check_known_stage
from onebit_jax.workers.processes import check_same
from onebit_jax.workers.states import check_stage


class Step:
    """A jitted training step that checks its arguments before it runs.

    Args:
      step: from what it carries (parameters and state), batches, further arguments and,
        by name, a static `stage`, to what it carries, and more. What it carries is
        donated.
      processes: the number of processes whose devices it runs on.
      carried: names of the first arguments, which it returns anew.
      batches: how many arguments after them are examples of all workers; None for all.
      static: names of the arguments that are compiled in.

    Attributes:
      jitted: the step as `jax.jit` makes it, without the checks.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        processes: int = 1,
        carried: tuple[str, ...] = ("params", "state"),
        batches: int | None = 1,
        static: tuple[str, ...] = ("stage",),
    ):
        self.jitted: Any = jax.jit(
            step,
            donate_argnums=tuple(range(len(carried))),
            static_argnames=static,
        )
        self._processes = processes
        self._carried = carried
        self._static = static
        self._batches = None if batches is None else len(carried) + batches
        # The first array of the last state returned, and for the stages that it has
        # begun how many more steps of each need no look at it.
        self._last: Callable[[], Any] = lambda: None
        self._begun: dict[str, float] = {}
        # The stages whose programs all processes have compared.
        self._compared: set[str | None] = set()

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Runs the step.

        Args:
          *args: what it carries, which is donated; the examples of all workers; further
            arguments of the loss.
          **options: `stage`, and what else is given to the optimizer's update.

        Returns:
          What it carries anew, and what the step returns besides.

        Raises:
          ValueError: if what it carries was donated to an earlier step or lies on
            different devices, a batch is one process's own and there are several, these
            hold other parameters, another state or other arguments, or would not run
            the same program, or `stage` cannot be the state's next.
        """
        number = len(self._carried)
        given, others = dict(zip(self._carried, args, strict=False)), args[number:]
        leaves = {name: jax.tree.leaves(tree) for name, tree in given.items()}
        # A look at one array of each, as there may be thousands; JAX can end in a
        # segmentation fault where all were donated.
        _check_not_donated(list(map(_first_array, leaves.values())), given)
        try:
            flat = list(itertools.chain(*leaves.values()))
            given = each_once(given, flat, (others, options))
            return self._run(given, *given.values(), *others, **options)
        except (RuntimeError, ValueError) as error:
            _check_not_donated(given, given)
            if "incompatible devices" in str(error):
                _check_one_mesh(given)
            raise

    def _run(self, given: dict[str, Any], *args: Any, **options: Any) -> Any:
        stage = options.get("stage")
        if self._processes > 1:
            for batch in args[len(given) : self._batches]:
                _check_global(batch, self._processes)
            comparable = self._processes == jax.process_count() and not any(
                isinstance(x, Tracer) for x in jax.tree.leaves(given)
            )
            if comparable and not self._compared:
                others = () if self._batches is None else args[self._batches :]
                named = {k: x for k, x in options.items() if k not in self._static}
                check_same({**given, "args": others, **named}, self._processes)
            if comparable and stage not in self._compared:
                _check_same_program(self.lower(*args, **options))
                self._compared.add(stage)
        if stage is None:
            return self.jitted(*args, **options)
        # To read a state's counters is to wait for the step that returns it: a state
        # that went through a stage already is not read for it again before it may end.
        last = len(given) - 1
        is_last = any(
            x is self._last() for x in _first_array(jax.tree.leaves(args[last]))
        )
        begun = self._begun if is_last else {}
        if stage not in begun:
            check_known_stage(args[last], stage)
        left = begun.get(stage, 0)
        if left < 1:
            left = check_stage(args[last], stage)
        result = self.jitted(*args, **options)
        for x in _first_array(jax.tree.leaves(result[last])):
            # After a step of another stage an interval may be a shorter one.
            others = {name: n if n == math.inf else 0 for name, n in begun.items()}
            self._last, self._begun = weakref.ref(x), {**others, stage: left - 1}
        return result

    def lower(self, *args: Any, **options: Any) -> Any:
        """As of a function that `jax.jit` returns."""
        return self.jitted.lower(*args, **options)

    def trace(self, *args: Any, **options: Any) -> Any:
        """As of a function that `jax.jit` returns."""
        return self.jitted.trace(*args, **options)


def each_once(carried: Any, leaves: list[Any], beside: Any) -> Any:
    """Copies of arrays that stand at two places, as an average of parameters may.

    They would be donated twice, or read beside their donation, which ends the process.

    Args:
      carried: what is donated.
      leaves: its leaves.
      beside: what is given with it.
    """
    seen = set(map(id, jax.tree.leaves(beside)))
    if len(seen.union(map(id, leaves))) == len(seen) + len(leaves):
        return carried

    def once(x: Any) -> Any:
        # To copy what was donated can end the process; it is told of later.
        if not _is_concrete(x) or x.is_deleted():
            return x
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(once, carried)


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _first_array(leaves: list[Any]) -> list[jax.Array]:
    """The first array of a tree's leaves, if it has one."""
    return list(itertools.islice((x for x in leaves if isinstance(x, jax.Array)), 1))


def _check_not_donated(looked_at: Any, given: Any) -> None:
    if not any(_is_concrete(x) and x.is_deleted() for x in jax.tree.leaves(looked_at)):
        return
    for path, leaf in jax.tree.leaves_with_path(given):
        if _is_concrete(leaf) and leaf.is_deleted():
            name, *inside = path
            raise ValueError(
                f"{name.key}{jax.tree_util.keystr(tuple(inside))} was donated to an "
                "earlier step, which reused its memory: go on with what that step "
                "returned, as in params, state, loss = run.step(params, state, batch)."
            )


def _check_one_mesh(given: Any) -> None:
    places: dict[frozenset[Any], str] = {}
    for (name, *inside), leaf in jax.tree.leaves_with_path(given):
        if _is_concrete(leaf):
            path = f"{name.key}{jax.tree_util.keystr(tuple(inside))}"
            places.setdefault(frozenset(leaf.sharding.device_set), path)
    if len(places) > 1:
        told = ", ".join(f"{path} is on {len(at)}" for at, path in places.items())
        raise ValueError(
            f"the step was given arrays on different devices, {told}: place parameters "
            "by run.init, and restore a state as abstract_state(tx, params, mesh) "
            "places it."
        )


def _check_global(batch: Any, processes: int) -> None:
    for path, leaf in jax.tree.leaves_with_path(batch):
        own = isinstance(leaf, np.ndarray | np.generic) or (
            _is_concrete(leaf) and leaf.is_fully_addressable
        )
        if own:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is this process's own array, and "
                f"{processes} processes train: make one array of "
                "all their rows by jax.make_array_from_process_local_data(sharding, "
                "rows), or by jax.device_put(batch, sharding) where each has them all."
            )


def _check_same_program(lowered: jax.stages.Lowered) -> None:
    # Learning rates, decays and the steps of a freeze are constants of the program.
    digest = hashlib.sha256(lowered.as_text().encode()).digest()
    own = np.frombuffer(digest, np.uint32)
    everyones = multihost_utils.process_allgather(own)
    others = np.flatnonzero((everyones != everyones[0]).any(axis=-1))
    if others.size:
        raise ValueError(
            f"process {others[0]} would run another step than process 0: give all "
            "processes the same code, settings (learning rate, freeze, exchange, batch "
            "size), shapes and versions."
        )
