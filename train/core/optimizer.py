"""The optimizers that can be chosen, and their learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
import optax

import onebit_jax
from train.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable


FREEZE = 0.2
"""Share of the steps after which a variance is frozen, where nothing else is said."""

FLOOR = 0.1
"""Share of the peak that the learning rate falls to, and stays at."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Schedule and freeze of an optimizer, all defaults put in.

    Attributes:
      prefix: What its flags begin with, as of `train.core.mesh.check_divisible`.
      earlier_steps: Steps of the run before its first.
      steps: Steps that the schedule is made for.
      batch: Examples a step, of all workers together.
      accumulate: Parts that a worker's share of them is computed in.
      learning_rate: Peak of the learning rate.
      warmup: Steps in which it rises.
      freeze: Steps before a variance is frozen, for an optimizer that does.
      decay_rate: Factor by which the learning rate falls.
      decay_every: Steps in which it falls by that; None for a linear fall to a tenth.
    """

    steps: int
    batch: int
    learning_rate: float
    warmup: int
    freeze: int | Literal["auto"]
    decay_rate: float = 1.0
    decay_every: int | None = None
    prefix: str = "--"
    earlier_steps: int = 0
    accumulate: int = 1

    @property
    def last(self) -> int:
        """The steps of the run at its end."""
        return self.earlier_steps + self.steps


def warmup_and_freeze(
    steps: int,
    warmup_steps: int | None,
    freeze_step: int | Literal["auto"] | None,
    share: float,
) -> tuple[int, int | Literal["auto"]]:
    """The steps of the learning rate's rise and before the freeze.

    Args:
      steps: Steps in all.
      warmup_steps: Those of the rise; None for a tenth of all.
      freeze_step: Those before the freeze; None for a share of all, but not before
        the rise ends.
      share: That share.

    Returns:
      Both.

    Example:
      >>> from train.core.optimizer import warmup_and_freeze
      >>> warmup_and_freeze(300, None, None, 0.2)
      (30, 60)
    """
    warmup = round(0.1 * steps) if warmup_steps is None else warmup_steps
    default = max(warmup, round(share * steps), 1)
    return warmup, default if freeze_step is None else freeze_step


def check_plan(plan: Plan) -> None:
    """Refuses a schedule whose learning rate rises to the end.

    Args:
      plan: The schedule.

    Raises:
      InputError: No step is left after the rise.
    """
    if plan.warmup >= plan.steps:
        flag = f"{plan.prefix}warmup-steps"
        raise InputError(
            f"{flag} {plan.warmup} leaves none of the {plan.steps} steps after the "
            f"learning rate's rise; give fewer {flag}, or more {plan.prefix}steps."
        )


def learning_rate_schedule(
    peak: float,
    warmup_steps: int,
    steps: int,
    *,
    decay_rate: float = 1.0,
    decay_every: int | None = None,
) -> optax.Schedule:
    """A linear rise to the peak, a linear fall to a tenth of it, then constant.

    Or an exponential fall, peak · decay_rate^(t / decay_every) of t steps after the
    rise, that goes on.

    Args:
      peak: The highest learning rate, that of step `warmup_steps - 1`.
      warmup_steps: Steps in which it rises.
      steps: Steps after which it falls no more, where it falls linearly.
      decay_rate: Factor by which it falls exponentially.
      decay_every: Steps in which it falls by that; None for a linear fall.

    Returns:
      A schedule: from the number of earlier steps to the learning rate.

    Example:
      >>> from train.core.optimizer import learning_rate_schedule
      >>> schedule = learning_rate_schedule(1.0, 2, 12)
      >>> [round(float(schedule(step)), 2) for step in (0, 1, 2, 7, 12, 99)]
      [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
    """
    if decay_every:
        fall = optax.schedules.exponential_decay(peak, decay_every, decay_rate)
    else:
        fall = optax.schedules.linear_schedule(
            peak, FLOOR * peak, max(1, steps - warmup_steps)
        )
    if not warmup_steps:
        return fall
    start = peak / warmup_steps
    rise = optax.schedules.linear_schedule(start, peak + start, warmup_steps)
    return optax.schedules.join_schedules([rise, fall], [warmup_steps])


def freeze_rule(
    freeze: int | Literal["auto"], warmup_steps: int, steps: int
) -> onebit_jax.FreezeRule:
    """The freeze rule that a freeze step stands for.

    Args:
      freeze: Steps before the freeze; 'auto' for the first at which the variance is
        stable.
      warmup_steps: Steps in which the learning rate rises.
      steps: Steps of the run; the variance is compared over a twentieth of them.

    Returns:
      The rule.
    """
    if freeze == "auto":
        return onebit_jax.freeze_when_stable(
            min_steps=max(1, warmup_steps), interval=max(1, steps // 20)
        )
    return onebit_jax.freeze_at(freeze)


def decays(params: Any) -> Any:
    """Which parameters decay: all but biases and the scales of norms."""

    def decays_at(path: tuple[Any, ...], _: Any) -> bool:
        return path[-1].key not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(decays_at, params)


def _adam(
    schedule: optax.Schedule, exchange: onebit_jax.Exchange, **decay: Any
) -> optax.GradientTransformation:
    exact = onebit_jax.exact_mean(exchange.axes)
    return optax.chain(exact, optax.adamw(schedule, **decay))


MATRIX_RATE = 8.0
"""The rate of Muon's matrices beside Adam's."""


def matrices(params: Any) -> Any:
    """Which parameters Muon orthogonalises: the kernels of layers, not of heads."""

    def numbers(path: tuple[Any, ...], p: Any) -> Any:
        names = [key.key for key in path]
        is_matrix = names[-1] == "kernel" and p.ndim == 2 and "head" not in names
        return optax.contrib.MuonDimensionNumbers() if is_matrix else None

    return jax.tree_util.tree_map_with_path(numbers, params)


def muon(
    schedule: optax.Schedule, *, weight_decay: float, mask: Any, **options: Any
) -> optax.GradientTransformation:
    """Muon for matrices inside the model, Adam for what is left, by Optax's options."""
    return optax.contrib.muon(
        lambda step: MATRIX_RATE * schedule(step),
        weight_decay=weight_decay / MATRIX_RATE,
        weight_decay_mask=mask,
        adam_learning_rate=schedule,
        muon_weight_dimension_numbers=matrices,
        **options,
    )


INNER = {"adamw": optax.adamw, "muon": muon}
"""The optimizers of `--inner`, by name."""


def local(
    schedule: optax.Schedule,
    exchange: onebit_jax.Exchange,
    inner: str = "adamw",
    sync: onebit_jax.IntervalRule | None = None,
    **decay: Any,
) -> optax.GradientTransformation:
    """Local steps of an optimizer of `INNER`, by default of eight a round."""
    sync = onebit_jax.every(8) if sync is None else sync
    return onebit_jax.local_steps(INNER[inner](schedule, **decay), exchange, sync)


class Optimizer(NamedTuple):
    """An optimizer of the command line.

    Attributes:
      make: From schedule, exchange and, if it obeys `--freeze-step`, freeze rule, and
        by name `weight_decay` and `mask`, to a transformation of each worker's own
        gradients.
      flags: Fields of `TrainingFlags` that other optimizers may lack.
      exchange: Name of the exchange that it works with; None for that of the flag.
      has_own_steps: Whether workers take steps of their own between exchanges.
      freeze: Share of the steps before the freeze by default, if it obeys the flag.
    """

    make: Callable[..., optax.GradientTransformation]
    flags: frozenset[str] = frozenset()
    exchange: str | None = None
    has_own_steps: bool = False
    freeze: float = FREEZE


_TWO_STAGES = frozenset({"exchange", "freeze_step"})

OPTIMIZERS = {
    # Of a whole run a warm-up by 8 bits then sends a fifteenth (docs/convergence.md).
    "onebit_adam": Optimizer(
        onebit_jax.onebit_adamw, _TWO_STAGES | {"warmup_bits"}, freeze=0.14
    ),
    "onebit_lamb": Optimizer(onebit_jax.onebit_lamb, _TWO_STAGES),
    "zero_one_adam": Optimizer(
        onebit_jax.zero_one_adam, _TWO_STAGES, has_own_steps=True
    ),
    "local": Optimizer(
        local, frozenset({"exchange", "inner", "sync"}), has_own_steps=True
    ),
    "binsgdm": Optimizer(onebit_jax.binsgdm, exchange="random_vote_mean"),
    "distributed_lion": Optimizer(onebit_jax.distributed_lion, exchange="vote_mean"),
    "adam": Optimizer(_adam),
}
"""The optimizers of `--optimizer`, by name."""

if TYPE_CHECKING:
    OptimizerName = str
    InnerName = str
else:
    OptimizerName = Literal[*OPTIMIZERS]
    InnerName = Literal[*INNER]


def make_optimizer(
    name: str,
    schedule: optax.Schedule,
    freeze: onebit_jax.FreezeRule,
    exchange: onebit_jax.Exchange,
    *,
    weight_decay: float,
    clip: float,
    warmup_exchange: onebit_jax.Exchange | None = None,
    inner: str = "adamw",
    sync: onebit_jax.IntervalRule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that takes each worker's own gradients and skips non-finite ones.

    Args:
      name: One of `OPTIMIZERS`.
      schedule: The learning rate.
      freeze: When a variance is frozen.
      exchange: What the workers do with what they send; its axes are the workers'.
      weight_decay: λ of decoupled weight decay.
      clip: Norm that gradients are clipped to; 0 for no clipping.
      warmup_exchange: What the workers do with their gradients before the freeze, for
        an optimizer that has `--warmup-bits`; None for the exact mean.
      inner: Each worker's own optimizer, for one that has `--inner`.
      sync: When workers synchronise, for one that has `--sync`; None for its default.

    Returns:
      A transformation for `onebit_jax.data_parallel`.
    """
    optimizer = OPTIMIZERS[name]
    rule = (freeze,) if "freeze_step" in optimizer.flags else ()
    has_bits = "warmup_bits" in optimizer.flags
    warmup = {"warmup_exchange": warmup_exchange} if has_bits else {}
    steps = {"inner": inner, "sync": sync} if "sync" in optimizer.flags else {}
    options = {"weight_decay": weight_decay, "mask": decays, **warmup, **steps}
    tx = optimizer.make(schedule, exchange, *rule, **options)
    return guarded(tx, clip, exchange.axes, own_steps=optimizer.has_own_steps)


def guarded(
    tx: optax.GradientTransformation,
    clip: float,
    axes: str | tuple[str, ...],
    *,
    own_steps: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer behind clipping, without the steps that are not finite.

    Args:
      tx: The optimizer.
      clip: Norm that gradients are clipped to; 0 for no clipping.
      axes: The mesh axes whose members are the workers.
      own_steps: Whether workers take steps of their own. Each then clips its own
        gradients, and takes those that are not finite for zeros, so that nothing is
        exchanged in such a step.
    """
    if own_steps:
        # By a norm that is not finite all values become NaN, and by that zeros.
        largest = clip or float(np.finfo(np.float32).max)
        own = optax.chain(optax.clip_by_global_norm(largest), optax.zero_nans())
        return optax.chain(onebit_jax.per_worker(own, axes), tx)
    if clip:
        tx = optax.chain(onebit_jax.clip_by_worker_norm(clip, axes), tx)
    return onebit_jax.skip_nonfinite(tx, axes)
