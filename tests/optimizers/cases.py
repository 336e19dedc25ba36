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
from optimizers import formula

import onebit_jax
from onebit_jax import freeze_at, onebit_adamw

# More than one leaf has rows and columns; one goes exactly.
SHAPES = {"bias": (17,), "kernel": (30, 17), "matrix": (16, 20), "scale": ()}
DECAYED = {"bias": False, "kernel": True, "matrix": True, "scale": False}


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer and the formula that it is to equal.

    Attributes:
      make: makes it, of a learning rate, an exchange, a freeze rule and more.
      warmup: Optax's, on the mean gradient, that the warm-up equals.
      leaf: the formula of one leaf.
      parts: those of the formula that it has.
      moments: for each moment of the state what Optax's state and the formula call it.
    """

    make: Callable[..., Any]
    warmup: Callable[..., Any]
    leaf: Callable[..., Any]
    parts: frozenset[str]
    moments: Mapping[str, tuple[str, str]]


def onebit_adam(learning_rate, exchange, freeze, published, **options):
    parts = onebit_jax.AS_PUBLISHED if published else {}
    return onebit_adamw(learning_rate, exchange, freeze, **parts, **options)


def row(parts, *, lead=0.0, **options):
    return Case(
        functools.partial(onebit_adam, **options),
        optax.adamw,
        functools.partial(formula.Leaf, parts=parts, lead=lead),
        parts,
        {"mu": ("mu", "m"), "nu": ("nu", "v")},
    )


CASES = {
    "1-bit Adam": row(formula.PARTS, lead=1.14, published=False),
    "1-bit Adam as published": row(frozenset(), published=True),
}
# With what is no default, which is asked for its formula alone.
FORMULAS = CASES | {
    "1-bit Adam of gradients": row(
        formula.PARTS, lead=1.14, published=False, send="gradient"
    ),
}


def freeze(step):
    return freeze_at(step)


def moments_of(state):
    """The optimizer's own state, below wrappers, which has a momentum mu."""
    while not hasattr(state, "mu"):
        state = state.inner if hasattr(state, "inner") else state[0]
    return state


def is_local(node):
    return isinstance(node, onebit_jax.WorkerLocal)


def replicated_of(state):
    """The arrays of a state that all workers have."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_local) if not is_local(x)]


def owed_of(state):
    """For each worker-local array of a state its mean, or what all shares hold."""
    found = []
    for node in jax.tree.leaves(state, is_leaf=is_local):
        if is_local(node):
            for x in jax.tree.leaves(node):
                whole = node.resizing == "average"
                found.append(jnp.mean(x, axis=0) if whole else x.reshape(-1))
    return found
