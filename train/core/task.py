"""A task: its parameters, its data, its loss, its evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import onebit_jax
from train.core.exchange import make_exchange, make_warmup_exchange
from train.core.optimizer import (
    OPTIMIZERS,
    freeze_rule,
    learning_rate_schedule,
    make_optimizer,
)
from train.core.output import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import grain
    import jax
    import optax
    from jax.sharding import Mesh

    from train.core.flags import TrainingFlags
    from train.core.optimizer import Plan

Params = Any
"""A tree of arrays."""

Evaluation = Callable[[Params], dict[str, float]]
"""From parameters to means over held-out examples by name, the loss as 'loss'."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """A stretch of steps with one kind of batches and one optimizer.

    Attributes:
      loss: From parameters, a worker's share of a batch and the number of earlier
        steps to its mean loss.
      batches: Element t is this process's part of the batch of the phase's step t.
      batch: Examples of a whole batch.
      tx: The optimizer, of each worker's own gradients.
      schedule: The learning rate, by the phase's steps that were not skipped.
      earlier_steps: Steps of the phases before.
      last: Steps of the run at its end.
      evaluation: From the parameters to start with to a compiled evaluation: a
        function from parameters to means over held-out examples by name, the loss
        as 'loss'. None for a phase without.
      eval_every: Steps between evaluations; there is one at the end.
      advice: Why the variance may not be frozen at the end, and what to do; nothing
        is said where it is empty.
      title: What is said at its beginning.
    """

    loss: Callable[[Params, Any, jax.Array], jax.Array]
    batches: grain.MapDataset[Any]
    batch: int
    tx: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule
    earlier_steps: int = 0
    last: int
    evaluation: Callable[[Params], Evaluation] | None = None
    eval_every: int = 1
    advice: str = ""
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """All that is a task's own in a training.

    Attributes:
      name: What the progress bar, the picture and messages call the training.
      model: Names and values that a checkpoint must have been saved with.
      init: The parameters that the first phase starts from.
      phases: Stretches of steps; each after the first starts from the mean of the
        workers' parameters at the end of the one before, and with a new state of its
        own optimizer.
      finish: Called with the mean of the workers' parameters after the last step, on
        all processes.
    """

    name: str
    model: Mapping[str, Any]
    init: Callable[[], Params]
    phases: Sequence[Phase]
    finish: Callable[[Params], None] = lambda params: None


def identity(model: Any, optimizer: str) -> dict[str, Any]:
    """The identity of a model, a dataclass, and its optimizer: `Task.model`."""
    values = {**asdict(model), "optimizer": optimizer}
    values.pop("remat", None)  # it changes no parameter, and may change in a run
    return values


def planned_phase(
    config: TrainingFlags, plan: Plan, last: int, mesh: Mesh, **values: Any
) -> Phase:
    """A phase to the step `last` with the optimizer of the flags, and other attributes.

    Says if the plan freezes too late.
    """
    optimizer = OPTIMIZERS[config.optimizer]
    schedule = learning_rate_schedule(
        plan.learning_rate,
        plan.warmup,
        plan.steps,
        decay_rate=plan.decay_rate,
        decay_every=plan.decay_every,
    )
    tx = make_optimizer(
        config.optimizer,
        schedule,
        freeze_rule(plan.freeze, plan.warmup, plan.steps),
        make_exchange(mesh, optimizer.exchange or config.exchange),
        weight_decay=config.weight_decay,
        clip=config.clip,
        warmup_exchange=make_warmup_exchange(mesh, config.warmup_bits),
        inner=config.inner,
        sync=onebit_jax.every(config.sync).ending_at(last - plan.earlier_steps),
    )
    freezes = "freeze_step" in optimizer.flags
    return Phase(
        batch=plan.batch,
        tx=tx,
        schedule=schedule,
        earlier_steps=plan.earlier_steps,
        last=last,
        advice=_freeze_advice(plan, last - plan.earlier_steps) if freezes else "",
        **values,
    )


def _freeze_advice(plan: Plan, steps: int) -> str:
    """Why so many steps may never reach the freeze, and what to do; said if known."""
    flag = f"{plan.prefix}freeze-step"
    if plan.freeze == "auto":
        return (
            "the variance was not stable; give a new run more steps, or a number as "
            f"{flag}"
        )
    if plan.freeze < steps:
        return ""
    advice = (
        f"{flag} is {plan.freeze:,} and the phase has {steps:,} steps; start a run "
        "with a smaller one, or with more steps"
    )
    say(f"no step will come after the freeze: {advice}.")
    return advice
