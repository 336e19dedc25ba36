"""The optimizers that can be chosen, and their learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import jax
import optax

import onebit_jax

if TYPE_CHECKING:
    from train.bert.config import Optimizer

FLOOR = 0.1
"""Share of the peak that the learning rate falls to, and stays at."""


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
    """Which parameters decay: all but biases and the scales of LayerNorms."""

    def decays_at(path: tuple[Any, ...], _: Any) -> bool:
        return path[-1].key not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(decays_at, params)


def make_optimizer(
    name: Optimizer,
    schedule: optax.Schedule,
    freeze: onebit_jax.FreezeRule,
    exchange: onebit_jax.Exchange,
    *,
    weight_decay: float,
    clip: float,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that takes each worker's own gradients and skips non-finite ones.

    Args:
      name: Which.
      schedule: The learning rate.
      freeze: When 1-bit Adam freezes its variance; not looked at for plain Adam.
      exchange: 1-bit Adam's of its compressed stage; plain Adam takes the exact mean
        over the same workers.
      weight_decay: λ of decoupled weight decay.
      clip: Norm that gradients are clipped to; 0 for no clipping.

    Returns:
      A transformation for `onebit_jax.data_parallel`.
    """
    axes = exchange.axes
    if name == "adam":
        tx = optax.chain(
            onebit_jax.exact_mean(axes),
            optax.adamw(schedule, weight_decay=weight_decay, mask=decays),
        )
    else:
        tx = onebit_jax.onebit_adamw(
            schedule,
            exchange,
            freeze,
            weight_decay=weight_decay,
            mask=decays,
        )
    if clip:
        tx = optax.chain(onebit_jax.clip_by_worker_norm(clip, axes), tx)
    return onebit_jax.skip_nonfinite(tx, axes)
