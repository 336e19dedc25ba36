"""Freeze rules: when the variance has become stable."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

from onebit_jax.workers.axes import bound_workers
from onebit_jax.workers.stages import run_stage

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float32, Int32

    from onebit_jax.exchanges.exchange import Exchange


_LAST = 2**31 - 1
"""The last step that an int32 counts; `optax.safe_increment` stays there."""


class FreezeRule(NamedTuple):
    """A rule for the step after which the variance is frozen.

    Attributes:
      init: makes the rule's state.
      update: from the state, the number of steps taken and the 1-norm of the
        variance that they led to, tells whether the variance is to be frozen now,
        and the new state. Called in compiled code at the end of each step until the
        freeze.
      earliest: the fewest steps after which it may freeze.
      reads_norm: whether it decides by the norms, which say nothing new after a step
        that has not refreshed the variance.

    Example:
      >>> import jax.numpy as jnp
      >>> def small(state, count, norm):
      ...     return (count >= 10) & (norm < 1), state
      >>> rule = FreezeRule(tuple, small, earliest=10, reads_norm=True)
      >>> print(rule.update((), jnp.int32(10), jnp.float32(0.5))[0])
      True
    """

    init: Callable[[], Any]
    update: Callable[
        [Any, Int32[Array, ""], Float32[Array, ""]], tuple[Bool[Array, ""], Any]
    ]
    earliest: int
    reads_norm: bool = False


class Freezing(NamedTuple):
    """The freeze of an optimizer's variance.

    Attributes:
      rule: when.
      exchange: the optimizer's. A single worker, which has nobody to exchange with,
        never freezes.
      norm: from the state the 1-norm of the variance.
      frozen: from the state after the last step before the freeze the one after it,
        with `frozen_at` set.
    """

    rule: FreezeRule
    exchange: Exchange
    norm: Callable[[Any], Any]
    frozen: Callable[[Any], Any]

    def if_due(self, state: Any, can_be: Bool[Array, ""] | bool = True) -> Any:
        """The state frozen, if the rule asks for it now.

        Args:
          state: with the steps taken so far as `count`, the rule's state as `freeze`.
          can_be: False where it must not be frozen whatever the rule asks.

        Returns:
          The state with the rule's new state.
        """
        norm = jnp.asarray(self.norm(state), jnp.float32)
        fires, rule = self.rule.update(state.freeze, state.count, norm)
        state = state._replace(freeze=rule)
        now = fires & (not self.exchange.is_alone()) & can_be
        return lax.cond(now, self.frozen, lambda same: same, state)


def freeze_then(
    warmup: Callable[[Any, Any, Any], tuple[optax.Updates, Any]],
    compressed: Callable[[Any, Any, Any], tuple[optax.Updates, Any]],
    freezing: Freezing,
) -> Callable[..., tuple[optax.Updates, Any]]:
    """The update of an optimizer that learns a variance and then freezes it.

    Args:
      warmup: from each worker's own gradients, the state with the number of this step
        as `count`, and the parameters, to the updates in float32 and the new state.
      compressed: the same, for steps after the freeze.
      freezing: when and how.

    Returns:
      The `update` of a transformation, with the extra argument `stage`.
    """

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        stage: str | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, Any]:
        del extra_args
        bound_workers(freezing.exchange.axes)
        state = state._replace(count=jnp.asarray(optax.safe_increment(state.count)))

        def learn() -> tuple[optax.Updates, Any]:
            new_updates, new = warmup(updates, state, params)
            return new_updates, freezing.if_due(new)

        stages = {
            "warmup": learn,
            "compressed": lambda: compressed(updates, state, params),
        }
        index = (state.frozen_at > 0).astype(jnp.int32)
        new_updates, state = run_stage(stages, index, stage)
        return optax.tree.cast_like(new_updates, updates), state

    return update


def stage_refusal(frozen_at: Any, stage: str, first: str = "warmup") -> str | None:
    """The reason why a stage cannot be the next one; None if it can.

    Args:
      frozen_at: of the state.
      stage: the name.
      first: the name of a stage that learns a variance.
    """
    if isinstance(frozen_at, Tracer) or not isinstance(frozen_at, jax.Array):
        return None
    step = int(frozen_at)
    if stage == first and step:
        return (
            f"the variance was frozen after {step} steps, and {stage!r} would learn "
            "another: go on with stage='compressed', or leave the stage out."
        )
    if stage != first and not step:
        return (
            f"no variance is frozen yet, so that {stage!r} has none to divide by: "
            f"begin with stage={first!r}, or leave the stage out."
        )
    return None


def freeze_at(step: int) -> FreezeRule:
    """Freezes the variance after a given number of warm-up steps.

    Args:
      step: number of steps of plain Adam, from 1 to 2³¹ - 1; the paper takes 15 % to
        25 % of all steps, and not fewer than the learning rate's warm-up.

    Returns:
      A rule.

    Raises:
      ValueError: if `step` is out of range.
      TypeError: if it is no integer.

    Example:
      >>> import jax.numpy as jnp
      >>> rule = freeze_at(100)
      >>> bool(rule.update(rule.init(), jnp.int32(100), jnp.float32(1.0))[0])
      True

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888,
      Algorithm 1 (T_w).
    """
    if isinstance(step, float):
        raise TypeError(
            f"freeze_at takes an integer, the number of steps, not {step}: of a share "
            "of the run, give round(share * steps)."
        )
    step = operator.index(step)
    if step < 1:
        raise ValueError(
            f"freeze_at needs at least one warm-up step to learn a variance, "
            f"got {step}."
        )
    if step > _LAST:
        raise ValueError(
            "freeze_at takes at most 2**31 - 1 steps, which no run reaches, got "
            f"{step}."
        )

    def update_fn(
        state: tuple[()], count: Int32[Array, ""], norm: Float32[Array, ""]
    ) -> tuple[Bool[Array, ""], tuple[()]]:
        del norm
        return count >= step, state

    return FreezeRule(tuple, update_fn, step)


class StableState(NamedTuple):
    """State of `freeze_when_stable`.

    Attributes:
      norms: (interval,) the 1-norm after step t stands at t modulo interval.
    """

    norms: Float32[Array, " interval"]


def freeze_when_stable(
    threshold: float = 0.96, *, min_steps: int, interval: int = 1000
) -> FreezeRule:
    r"""Freezes the variance once it has stopped changing.

    .. math::
      \min\left(\frac{\|v_t\|_1}{\|v_{t-\Delta}\|_1},
      \frac{\|v_{t-\Delta}\|_1}{\|v_t\|_1}\right) \ge threshold

    and not before `min_steps` steps, nor before `interval` + 1, the first that have an
    earlier norm to be compared with. The paper's test looks at the first ratio alone,
    which passes at once while the variance still grows.

    Args:
      threshold: between 0 and 1.
      min_steps: number of steps before which it does not freeze; not fewer than
        the learning rate's warm-up.
      interval: Δ in steps; the paper takes :math:`1 / (1 - \beta_2)`.

    Returns:
      A rule.

    Raises:
      ValueError: if an argument is out of range.
      TypeError: if `min_steps` or `interval` is no integer.

    Example:
      >>> import jax.numpy as jnp
      >>> rule = freeze_when_stable(min_steps=2, interval=1)
      >>> state, fired = rule.init(), []
      >>> for t, norm in enumerate([1.0, 2.0, 2.01], start=1):
      ...     now, state = rule.update(state, jnp.int32(t), jnp.float32(norm))
      ...     fired.append(bool(now))
      >>> fired
      [False, False, True]

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888,
      Section 7.1 (one-sided there).
    """
    if not 0 < threshold < 1:
        raise ValueError(f"threshold must lie between 0 and 1, got {threshold}.")
    min_steps, interval = operator.index(min_steps), operator.index(interval)
    if min_steps < 1 or interval < 1:
        raise ValueError(
            "min_steps and interval must be at least 1, got "
            f"{min_steps} and {interval}."
        )
    if max(min_steps, interval) > _LAST:
        raise ValueError(
            "min_steps and interval must be at most 2**31 - 1, got "
            f"{min_steps} and {interval}."
        )

    def init_fn() -> StableState:
        return StableState(jnp.zeros(interval, jnp.float32))

    def update_fn(
        state: StableState, count: Int32[Array, ""], norm: Float32[Array, ""]
    ) -> tuple[Bool[Array, ""], StableState]:
        place = count % interval
        before = state.norms[place]
        # A product instead of ratios: norms may be zero.
        stable = jnp.minimum(norm, before) >= threshold * jnp.maximum(norm, before)
        old_enough = (count >= min_steps) & (count > interval)
        return stable & old_enough, StableState(state.norms.at[place].set(norm))

    return FreezeRule(init_fn, update_fn, max(min_steps, interval + 1), reads_norm=True)


def warn_if_rising(learning_rate: optax.ScalarOrSchedule, freeze: FreezeRule) -> None:
    """Warns the caller's caller of a freeze before the learning rate has risen.

    Args:
      learning_rate: a number, or a schedule from the step.
      freeze: when the variance is frozen.

    Warns:
      UserWarning: if the learning rate rises at the earliest step of the freeze. Not of
        a schedule that `optax.inject_hyperparams` is given, or made of its arguments:
        their values are not known.
    """
    if not callable(learning_rate):
        return
    # Under inject_hyperparams the optimizer is made again while it is traced.
    with jax.ensure_compile_time_eval():
        now, after = (
            learning_rate(jnp.int32(min(step, _LAST)))
            for step in (freeze.earliest, freeze.earliest + 1)
        )
    if isinstance(now, Tracer) or isinstance(after, Tracer):
        return
    now, after = (float(np.asarray(rate)) for rate in (now, after))
    if after > now:
        warnings.warn(
            f"The variance may be frozen after {freeze.earliest} steps, while the "
            f"learning rate still rises (from {now:.3g}): freeze it when the "
            "learning rate's warm-up has ended.",
            stacklevel=3,
        )
