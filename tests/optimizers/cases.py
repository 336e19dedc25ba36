"""The optimizers that the suite asks: a row each, and how to read their states.

What depends on the form of an optimizer's arguments and state stands here alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optimizers import formula, formula_zero_one

import onebit_jax
from onebit_jax import freeze_at, growing_intervals, onebit_adamw, zero_one_adam

# More than one leaf has rows and columns; one goes exactly.
SHAPES = {"bias": (17,), "kernel": (30, 17), "matrix": (16, 20), "scale": ()}
DECAYED = {"bias": False, "kernel": True, "matrix": True, "scale": False}
LONGEST = 100
"""The most steps that a row is asked for."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer and the formula that it is to equal.

    Attributes:
      make: makes it, of a learning rate, an exchange, a freeze rule and more.
      moments: for each moment of the state what the formula calls it, and what Optax's
        state does.
      stage: from the number of a step, from 0, and of the freeze to the step's stage;
        None for an optimizer without stages.
      leaf: the formula of one leaf; None where it is asked for in a file of its own.
      warmup: Optax's, on the mean gradient, that the steps before the freeze equal;
        None for none.
      parts: those of 1-bit Adam's formula that it has.
      exchange: makes the one that it is asked with.
      by_chance: True where what is agreed depends on the number of workers.
    """

    make: Callable[..., Any]
    moments: Mapping[str, tuple[str | None, str | None]]
    stage: Callable[[int, int], str] | None = None
    leaf: Callable[..., Any] | None = None
    warmup: Callable[..., Any] | None = None
    parts: frozenset[str] = frozenset()
    exchange: Callable[[], onebit_jax.Exchange] = lambda: onebit_jax.sign_mean(
        "data", block_size=32
    )
    by_chance: bool = False


def onebit_adam(learning_rate, exchange, freeze, published, **options):
    parts = onebit_jax.AS_PUBLISHED if published else {}
    return onebit_adamw(learning_rate, exchange, freeze, **parts, **options)


def onebit_adam_row(parts, *, lead=0.0, refresh=None, **options):
    refreshes = refresh and formula_zero_one.due_steps(refresh, LONGEST)
    if refresh:
        options["refresh"] = growing_intervals(refresh)

    def stage(step, freeze):
        if step < freeze:
            between = refresh and step + 1 not in refreshes
            return "between" if between else "warmup"
        measures = "growth" in parts and (step + 1) % formula.PERIOD == 0
        return "compressed/measuring" if measures else "compressed"

    return Case(
        functools.partial(onebit_adam, **options),
        {"mu": ("m", "mu"), "nu": ("v", "nu")},
        stage,
        functools.partial(formula.Leaf, parts=parts, lead=lead, refreshes=refreshes),
        optax.adamw,
        parts,
    )


def zero_one_adam_row(*, refresh, sync, longest, gradients=False, **options):
    refreshes = formula_zero_one.due_steps(refresh, LONGEST)
    syncs = formula_zero_one.due_steps(sync, LONGEST, longest)

    def stage(step, freeze):
        if step < freeze:
            between = "gradient" if gradients else "compressed"
            return "variance" if step + 1 in refreshes else between
        return "compressed" if step + 1 - freeze in syncs else "local"

    return Case(
        functools.partial(
            zero_one_adam,
            refresh=growing_intervals(refresh),
            sync=growing_intervals(sync, longest=longest),
            **options,
        ),
        {"own_mu": ("own_m", None), "nu": ("v", None)},
        stage,
        functools.partial(
            formula_zero_one.Leaf,
            refreshes=refreshes,
            syncs=syncs,
            published="bound" in options,
        ),
    )


def unfrozen(make):
    """Of an optimizer that freezes nothing."""

    def made(learning_rate, exchange, freeze, **options):
        del freeze
        return make(learning_rate, exchange, **options)

    return made


def unnamed(*moments):
    return dict.fromkeys(moments, (None, None))


CASES = {
    "1-bit Adam": onebit_adam_row(formula.PARTS, lead=1.14, published=False),
    "1-bit Adam as published": onebit_adam_row(frozenset(), published=True),
    "0/1 Adam": zero_one_adam_row(refresh=2, sync=1, longest=3),
    "0/1 Adam as DeepSpeed's": zero_one_adam_row(
        refresh=1, sync=2, longest=2, gradients=True, **onebit_jax.AS_DEEPSPEED
    ),
    "1-bit LAMB": Case(
        onebit_jax.onebit_lamb,
        unnamed("mu", "nu", "nu_fresh"),
        lambda step, freeze: "warmup" if step < freeze else "compressed",
    ),
    "BinSGDM": Case(
        unfrozen(onebit_jax.binsgdm),
        unnamed("mu", "magnitude"),
        exchange=functools.partial(onebit_jax.random_vote_mean, "data"),
        by_chance=True,
    ),
    "Distributed Lion": Case(
        unfrozen(onebit_jax.distributed_lion),
        unnamed("mu"),
        exchange=functools.partial(onebit_jax.vote_mean, "data"),
    ),
}
# With what is no default, which is asked for its formula alone, and without those that
# are asked for it in files of their own.
FORMULAS = {
    "1-bit Adam of gradients": onebit_adam_row(
        formula.PARTS, lead=1.14, published=False, send="gradient"
    ),
    "1-bit Adam refreshed at intervals": onebit_adam_row(
        formula.PARTS, lead=1.14, refresh=2, published=False
    ),
    "0/1 Adam to the letter": zero_one_adam_row(
        refresh=3, sync=2, longest=4, floor=None, bound=None
    ),
    **{name: case for name, case in CASES.items() if case.leaf},
}
del FORMULAS["0/1 Adam as DeepSpeed's"]
UNBOUNDED = "1-bit Adam as published", "0/1 Adam to the letter"
"""Those whose frozen variance has no floor."""


def freeze(step):
    return freeze_at(step)


def moments_of(state):
    """The optimizer's own state, below wrappers and before others of a chain."""
    while hasattr(state, "inner") or not hasattr(state, "_fields"):
        state = state.inner if hasattr(state, "inner") else state[0]
    return state


def moment_of(state, name):
    """A moment of the state, each worker's own where they differ."""
    moment = getattr(moments_of(state), name)
    return moment.value if is_local(moment) else moment


def is_local(node):
    return isinstance(node, onebit_jax.WorkerLocal)


def replicated_of(state):
    """The arrays of a state that all workers have."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_local) if not is_local(x)]


def residuals_of(state):
    """For each worker-local array of a state its mean, or what all shares hold."""
    found = []
    for node in jax.tree.leaves(state, is_leaf=is_local):
        if is_local(node):
            for x in jax.tree.leaves(node):
                whole = node.resizing == "average"
                found.append(jnp.mean(x, axis=0) if whole else x.reshape(-1))
    return found
