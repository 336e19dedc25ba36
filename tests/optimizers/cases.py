"""The optimizers that the suite asks: a row each, and how to read their states.

What depends on the form of an optimizer's arguments and state stands here alone.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optimizers import formulas
from optimizers.formulas import due_steps

import onebit_jax
from onebit_jax import (
    Compressed,
    Exchange,
    exact_mean,
    freeze_at,
    growing_intervals,
)
from onebit_jax.optimizers.parts.moments import as_float32

# More than one leaf has rows and columns; one goes exactly.
SHAPES = {"bias": (17,), "kernel": (30, 17), "matrix": (16, 20), "scale": ()}
DECAYED = {"bias": False, "kernel": True, "matrix": True, "scale": False}
FREEZE = 3
"""The step of the freeze in all but the formulas."""
LONGEST = 100
"""The most steps that a row is asked for."""
PUBLISHED = {"compressed": Compressed.published()}
FLOORED = frozenset({"floor", "bound, low", "bound, high"})


@dataclasses.dataclass(frozen=True)
class UntoldMean(Exchange):
    """The exact mean without saying so, so that all variances are frozen."""

    axes: tuple[str, ...]

    def update(self, updates, state, params=None):
        return exact_mean(self.axes).update(updates, state)


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer and the formula that it is to equal.

    Attributes:
      make: makes it, of a learning rate, an exchange and, if it has stages, a freeze
        rule.
      moments: where each moment is in the state, what the formula calls it, and what
        Optax's state does.
      leaf: the formula of one leaf; None where it is asked for in a file of its own.
      uses: the parts and limits that change something in the formula's steps.
      decays: what the formula is asked with, arguments of both.
      stage: from the number of a step, from 0, and of the freeze to the step's stage;
        None for an optimizer without stages.
      refused: the stages that cannot be the next after so many steps.
      warmup: Optax's, on the mean gradient, that the steps before the freeze equal;
        None for none.
      warmup_options: what it is asked with then.
      exchange: makes the one that it is asked with.
      exact: the exchange that it equals its formula with.
      by_chance: True where what is agreed depends on the number of workers.
      freezes: whether an optimizer with stages freezes a variance.
    """

    make: Callable[..., Any]
    moments: Mapping[str, tuple[str | None, str | None]]
    leaf: Callable[..., Any] | None = None
    uses: frozenset[str] = frozenset()
    decays: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"b1": 0.8, "b2": 0.95, "eps": 1e-3}
    )
    stage: Callable[[int, int], str] | None = None
    refused: Mapping[int, frozenset[str]] = dataclasses.field(default_factory=dict)
    warmup: Callable[..., Any] | None = None
    warmup_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    exchange: Callable[[], onebit_jax.Exchange] = lambda: onebit_jax.sign_mean(
        "data", block_size=32
    )
    exact: onebit_jax.Exchange = dataclasses.field(
        default_factory=lambda: UntoldMean(("data",))
    )
    by_chance: bool = False
    freezes: bool = True


def frozen_stage(step, freeze):
    return "warmup" if step < freeze else "compressed"


def measured_stage(step, freeze):
    measures = step >= freeze and (step + 1) % formulas.PERIOD == 0
    return "compressed/measuring" if measures else frozen_stage(step, freeze)


FROZEN = {0: frozenset({"compressed"}), FREEZE: frozenset({"warmup"})}
ADAM = Case(
    onebit_jax.onebit_adamw,
    {"mu": ("m", "mu"), "nu": ("v", "nu")},
    functools.partial(formulas.OnebitAdam, lead=1.14),
    FLOORED,
    stage=measured_stage,
    refused=FROZEN,
    warmup=optax.adamw,
)
LAMB = Case(
    onebit_jax.onebit_lamb,
    {"mu": ("m", "mu"), "nu": ("v", "nu"), "nu_fresh": ("fresh", None)},
    formulas.OnebitLamb,
    FLOORED | {"ratio, high", "factor, low", "factor, high", "change, low"},
    stage=frozen_stage,
    refused=FROZEN,
    warmup=optax.lamb,
    warmup_options={"ratio_limits": (0, 1e6)},
)


def zero_one_adam_row(*, refresh, sync, longest, before="compressed", **options):
    refreshes, syncs = due_steps(refresh, LONGEST), due_steps(sync, LONGEST, longest)

    def stage(step, freeze):
        if step < freeze:
            return "variance" if step + 1 in refreshes else before
        return "compressed" if step + 1 - freeze in syncs else "local"

    make = functools.partial(
        onebit_jax.zero_one_adam,
        refresh=growing_intervals(refresh),
        sync=growing_intervals(sync, longest=longest),
        **options,
    )
    leaf = functools.partial(formulas.ZeroOneAdam, refreshes=refreshes, syncs=syncs)
    learns = frozenset({"variance", before} - {"compressed"})
    refused = {0: frozenset({"local", "compressed"}), FREEZE: learns | {"local"}}
    moments = {"own_mu": ("own_m", None), "nu": ("v", None)}
    return Case(make, moments, leaf, FLOORED, stage=stage, refused=refused)


def relaxed(tx):
    """Optax's, whose own arithmetic mixes integers and floats."""
    tx = optax.with_extra_args_support(tx)

    def update(*args, **extra):
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(*args, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def local_adam(
    learning_rate, exchange, weight_decay=0.0, mask=None, b1=0.9, b2=0.999, eps=1e-8
):
    decays = [as_float32(x) for x in (b1, b2, eps)]
    inner = optax.adamw(learning_rate, *decays, weight_decay=weight_decay, mask=mask)
    return onebit_jax.local_steps(relaxed(inner), exchange, onebit_jax.every(3))


CASES = {
    "1-bit Adam": ADAM,
    "1-bit Adam as published": dataclasses.replace(
        ADAM,
        make=functools.partial(onebit_jax.onebit_adamw, **PUBLISHED),
        leaf=functools.partial(formulas.OnebitAdam, parts=frozenset()),
        uses=frozenset(),
        stage=frozen_stage,
    ),
    "0/1 Adam": zero_one_adam_row(refresh=2, sync=1, longest=3),
    "0/1 Adam as DeepSpeed's": dataclasses.replace(
        zero_one_adam_row(
            refresh=1,
            sync=2,
            longest=2,
            before="gradient",
            before_freeze="gradient",
            decay="accumulated",
            bias_correction=False,
            **PUBLISHED,
        ),
        leaf=None,
    ),
    "1-bit LAMB": LAMB,
    "local Adam": Case(
        local_adam,
        {"mu": ("own_m", None), "nu": ("own_v", None)},
        functools.partial(formulas.LocalAdam, rate=0.05, interval=3),
        stage=lambda step, freeze: "local" if (step + 1) % 3 else "sync",
        refused={2: frozenset({"local"})},
        freezes=False,
    ),
    "BinSGDM": Case(
        onebit_jax.binsgdm,
        {"own.inner.mu": ("m", None), "own.inner.magnitude": ("b", None)},
        formulas.Binsgdm,
        decays={"decay": 0.8, "eps": 1e-3},
        exchange=functools.partial(onebit_jax.random_vote_mean, "data"),
        by_chance=True,
    ),
    "Distributed Lion": Case(
        onebit_jax.distributed_lion,
        {"own.inner.trace": ("m", None)},
        functools.partial(formulas.DistributedLion, agree=formulas.majority),
        decays={"b1": 0.8, "b2": 0.95},
        exchange=functools.partial(onebit_jax.vote_mean, "data"),
        exact=onebit_jax.vote_mean("data"),
    ),
}


def form_of(case, options, leaf_options, uses=frozenset()):
    """A row with options of the optimizer and what its formula calls them."""
    return dataclasses.replace(
        case,
        make=functools.partial(case.make, **options),
        leaf=functools.partial(case.leaf, **leaf_options),
        uses=uses,
    )


NARROW = {"ratio_limits": (0.2, 0.3), "ratio_decay": 0.5, "factor_change": 0.02}
UNCORRECTED = {"bias_correction": False}
# With what is no default, which is asked for its formula alone.
FORMULAS = {name: case for name, case in CASES.items() if case.leaf} | {
    "1-bit Adam without bias correction": form_of(
        ADAM, UNCORRECTED, UNCORRECTED, ADAM.uses
    ),
    "0/1 Adam to the letter": form_of(
        zero_one_adam_row(refresh=3, sync=2, longest=4),
        PUBLISHED,
        {"parts": frozenset()},
    ),
    "0/1 Adam by gradients": form_of(
        zero_one_adam_row(
            refresh=3, sync=2, longest=4, before="gradient", before_freeze="gradient"
        ),
        PUBLISHED,
        {"parts": frozenset()},
    ),
    "1-bit LAMB as published": form_of(
        LAMB, PUBLISHED | UNCORRECTED, {"parts": frozenset()} | UNCORRECTED
    ),
    "1-bit LAMB in narrow limits": form_of(
        LAMB,
        NARROW,
        NARROW,
        FLOORED | {"ratio, low", "ratio, high", "change, low", "change, high"},
    ),
    "1-bit LAMB with a bound alone": form_of(
        LAMB,
        {"compressed": Compressed(lead=None, growth=None, floor=None)},
        {"parts": {"bound"}},
        FLOORED - {"floor"},
    ),
    "Distributed Lion by means": dataclasses.replace(
        CASES["Distributed Lion"],
        leaf=functools.partial(formulas.DistributedLion, agree=formulas.mean_vote),
        exact=onebit_jax.vote_mean("data", back="mean"),
    ),
}


def maker(case, step=FREEZE, **options):
    """A function that makes an optimizer, of a learning rate and more.

    Args:
      case: its row, or the name of that.
      step: of the freeze.
      **options: of the optimizer; the exchange that the row is asked with without one.
    """
    case = CASES[case] if isinstance(case, str) else case
    freeze = {"freeze": freeze_at(step)} if case.stage and case.freezes else {}
    options = {"exchange": case.exchange(), **freeze, **options}
    return functools.partial(case.make, **options)


def made(case, step=FREEZE, *, learning_rate=0.1, **options):
    """The optimizer itself."""
    return maker(case, step, **options)(learning_rate=learning_rate)


def tree_of(seed, workers=None, dtypes=None, scale=1.0, mean=0.1):
    """Random values of all leaves, those of each worker along a first axis."""
    rng, leading = np.random.default_rng(seed), () if workers is None else (workers,)
    dtypes = dict.fromkeys(SHAPES, jnp.float32) if dtypes is None else dtypes
    return {
        k: jnp.asarray(rng.normal(mean, scale, size=(*leading, *s)), dtypes[k])
        for k, s in SHAPES.items()
    }


def moments_of(state):
    """The optimizer's own state, below wrappers and before others of a chain."""
    while hasattr(state, "inner") or not hasattr(state, "_fields"):
        state = state.inner if hasattr(state, "inner") else state[0]
    return state


def moment_of(state, name):
    """A moment of the state, each worker's own where they differ."""
    moment = operator.attrgetter(name)(moments_of(state))
    return jax.tree.map(
        lambda x: x.value if is_local(x) else x, moment, is_leaf=is_local
    )


def is_local(node):
    return isinstance(node, onebit_jax.WorkerLocal)


def replicated_of(state):
    """The arrays of a state that all workers have."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_local) if not is_local(x)]


def residuals_of(state):
    """For each worker-local array of a state its mean, or what all shares hold."""
    found = []
    for node in jax.tree.leaves(state, is_leaf=is_local):
        # What is given to all as the first has it counts something.
        if is_local(node) and node.resizing != "first":
            for x in jax.tree.leaves(node):
                whole = node.resizing == "average"
                found.append(jnp.mean(x, axis=0) if whole else x.reshape(-1))
    return found
