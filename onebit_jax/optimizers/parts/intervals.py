"""Rules for steps at intervals: when a variance is refreshed, when workers agree."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Bool, Int32


_LIMIT = 2**30
"""The longest interval, in steps: twice as many are no int32."""


class IntervalRule(NamedTuple):
    """A rule that says of each step whether it is due.

    Attributes:
      init: makes the rule's state.
      update: from the state and the number of the step, which counts from 1, tells
        whether the step is due, and the new state. Called once a step, in compiled
        code, with the same values on all workers.

    Example:
      >>> import jax.numpy as jnp
      >>> def first_hundred_then_every_tenth(state, count):
      ...     return (count <= 100) | (count % 10 == 0), state
      >>> rule = IntervalRule(tuple, first_hundred_then_every_tenth)
      >>> [bool(rule.update((), jnp.int32(t))[0]) for t in (7, 107, 110)]
      [True, False, True]
    """

    init: Callable[[], Any]
    update: Callable[[Any, Int32[Array, ""]], tuple[Bool[Array, ""], Any]]

    def ending_at(self, steps: int) -> IntervalRule:
        """The same rule, with the last step of a run due as well.

        It counts the optimizer's steps. Those that a `skip_nonfinite` around it skips
        are none, and a run of so many batches then ends before the last: end it with
        `stage='sync'`, or let what skips stand inside `local_steps`, as
        `optax.apply_if_finite`, which counts them. Around it, `accumulate` makes one of
        several batches.

        Args:
          steps: number of steps of the run.

        Returns:
          A rule.

        Example:
          >>> import jax.numpy as jnp
          >>> rule = every(3).ending_at(7)
          >>> state, due = rule.init(), []
          >>> for step in range(1, 8):
          ...     now, state = rule.update(state, jnp.int32(step))
          ...     due += [step] if now else []
          >>> due
          [3, 6, 7]
        """
        last = _positive("steps", steps)

        def update_fn(
            state: Any, count: Int32[Array, ""]
        ) -> tuple[Bool[Array, ""], Any]:
            due, state = self.update(state, count)
            # The state tells that the next step is due.
            state = optax.tree.where(count + 1 == last, _overdue(state), state)
            return due | (count == last), state

        return IntervalRule(self.init, update_fn)


class IntervalState(NamedTuple):
    """State of a rule of intervals.

    Attributes:
      interval: steps from one due step to the next. The limits of the rule that goes on
        with the state hold: `every(4)` does not wait for the 8 steps of `every(8)`.
      waited: steps since the last that was due.
      counted: of `growing_intervals` the due steps, or with counting='steps' all
        steps, since the interval last doubled.
    """

    interval: Int32[Array, ""]
    waited: Int32[Array, ""]
    counted: Int32[Array, ""]


def every(steps: int, first: int | None = None) -> IntervalRule:
    """The last of every so many steps is due.

    Args:
      steps: from 1 to 2³⁰; 1 for every step.
      first: the first due step, from 1 to 2³⁰; None for `steps`. Parts of the
        parameters with first steps of their own synchronise in turn.

    Returns:
      A rule.

    Raises:
      ValueError: if a number is out of range.
      TypeError: if it is no integer.

    Example:
      >>> import jax.numpy as jnp
      >>> rule = every(3)
      >>> state, due = rule.init(), []
      >>> for step in range(1, 8):
      ...     now, state = rule.update(state, jnp.int32(step))
      ...     due.append(bool(now))
      >>> due
      [False, False, True, False, False, True, False]
    """
    interval = _positive("steps", steps)
    waited = 0 if first is None else interval - _positive("first", first)
    return _intervals(
        lambda: interval,
        lambda state, due, count: state,
        (interval, interval),
        waited=waited,
    )


def growing_intervals(
    double_after: int,
    *,
    longest: int | None = None,
    counting: Literal["times", "steps"] = "times",
    aligned: bool = False,
) -> IntervalRule:
    r"""Every step is due at first; the interval doubles after so many due steps.

    With k_j the j-th due step, counted from 1,

    .. math:: k_{j+1} - k_j = \min\left(2^{\lfloor j / \kappa \rfloor}, L\right)

    Args:
      double_after: :math:`\kappa`, from 1 to 2³⁰.
      longest: L in steps, from 1 to 2³⁰, which is the limit without one.
      counting: what :math:`\kappa` counts: 'times' for due steps, as the paper does,
        or 'steps' for all steps, as DeepSpeed does for its local steps.
      aligned: True for due steps whose own number is a multiple of the interval, as
        DeepSpeed has them: the first interval after a doubling may then be shorter.

    Returns:
      A rule.

    Raises:
      ValueError: if a number is out of range, or `counting` is neither.
      TypeError: if a number is no integer.

    Example:
      >>> import jax.numpy as jnp
      >>> rule = growing_intervals(2)
      >>> state, due = rule.init(), []
      >>> for step in range(1, 16):
      ...     now, state = rule.update(state, jnp.int32(step))
      ...     due += [step] if now else []
      >>> due
      [1, 2, 4, 6, 10, 14]

    References:
      Lu et al., 0/1 Adam, 2022, https://arxiv.org/abs/2202.06009, section 6 (the
      policies of :math:`T_v` and :math:`T_u`).
    """
    if counting not in ("times", "steps"):
        raise ValueError(f"counting must be 'times' or 'steps', got {counting!r}.")
    limit = _LIMIT if longest is None else _positive("longest", longest)
    double_after = _positive("double_after", double_after)

    def doubled(
        state: IntervalState, due: Bool[Array, ""], count: Int32[Array, ""]
    ) -> IntervalState:
        del count
        counts = due if counting == "times" else jnp.bool(True)
        counted = state.counted + counts.astype(jnp.int32)
        doubles = counted >= double_after
        # Twice the limit may be no int32.
        double = jnp.where(state.interval > limit // 2, limit, 2 * state.interval)
        return state._replace(
            interval=jnp.where(doubles, double, state.interval),
            counted=jnp.where(doubles, 0, counted),
        )

    return _intervals(lambda: 1, doubled, (1, limit), aligned=aligned)


def intervals_by_learning_rate(
    learning_rate: optax.Schedule,
    coefficient: float,
    *,
    shortest: int = 1,
    longest: int | None = None,
    warmup_steps: int = 0,
) -> IntervalRule:
    r"""Intervals that grow as the learning rate falls: the quadratic rule, QSR.

    An interval that begins after t steps has, with :math:`w` steps of a rising rate,

    .. math:: H = \min\left(\max\left(H_0, \left\lfloor \left(
      \frac{a}{\eta_{\max(t, w)}} \right)^2 \right\rfloor\right), L\right)

    Args:
      learning_rate: :math:`\eta`, the schedule of the optimizer that workers step by.
      coefficient: a, a learning rate: at a the quotient is one step, at a tenth of it a
        hundred.
      shortest: :math:`H_0` in steps, from 1 to 2³⁰.
      longest: L in steps, from 1 to 2³⁰, which is the limit without one.
      warmup_steps: w, from 0 to 2³⁰, in which the rate rises: intervals that begin in
        them are as long as the first after them, as the paper's are.

    Returns:
      A rule.

    Raises:
      ValueError: if a number is out of range.
      TypeError: if the learning rate is no schedule, or a number no integer.

    Example:
      >>> import jax.numpy as jnp
      >>> def falling(step):
      ...     return jnp.where(step < 4, 0.1, 0.05)
      >>> rule = intervals_by_learning_rate(falling, 0.1, shortest=2)
      >>> state, due = rule.init(), []
      >>> for step in range(1, 13):
      ...     now, state = rule.update(state, jnp.int32(step))
      ...     due += [step] if now else []
      >>> due
      [2, 4, 8, 12]

    References:
      Gu et al., A quadratic synchronization rule for distributed deep learning, 2023,
      https://arxiv.org/abs/2310.14423.
    """
    if not callable(learning_rate):
        raise TypeError(
            f"learning_rate must be a schedule, got {learning_rate!r}: with a constant "
            "rate every interval is the same, so give every(n)."
        )
    if not coefficient > 0:
        raise ValueError(f"coefficient must be more than 0, got {coefficient}.")
    least = _positive("shortest", shortest)
    limit = _LIMIT if longest is None else _positive("longest", longest)
    risen = operator.index(warmup_steps)
    if not 0 <= risen <= _LIMIT:
        raise ValueError(f"warmup_steps must be from 0 to 2**30, got {risen}.")

    def interval(count: ArrayLike) -> Int32[Array, ""]:
        rate: Any = learning_rate(jnp.maximum(jnp.asarray(count, jnp.int32), risen))
        quotient = jnp.float32(coefficient) / jnp.asarray(rate, jnp.float32)
        # A rate of zero makes it infinite, and the limit is an exact float32.
        longer = jnp.minimum(jnp.floor(quotient**2), jnp.float32(_LIMIT))
        return jnp.clip(longer.astype(jnp.int32), least, limit)

    def next_interval(
        state: IntervalState, due: Bool[Array, ""], count: Int32[Array, ""]
    ) -> IntervalState:
        longer = jnp.where(due, interval(count), state.interval)
        return state._replace(interval=longer)

    return _intervals(lambda: interval(0), next_interval, (least, limit))


def check_interval_rule(name: str, rule: Any) -> None:
    """Refuses what is no rule of intervals.

    Args:
      name: the argument's.
      rule: what is to be one.

    Raises:
      TypeError: if it is not.
    """
    if not isinstance(rule, IntervalRule):
        raise TypeError(
            f"{name} must be a rule of intervals, such as every(8), got {rule!r}."
        )


def update_in_stage(
    rule: IntervalRule, state: Any, count: Int32[Array, ""], happens: bool | None
) -> tuple[Bool[Array, ""], Any]:
    """The update of a rule in a step of which a static stage may say what it does.

    A step that does early what is done at intervals is a due one, from which the next
    interval begins. One that was due and does not leaves the next step due.

    Args:
      rule: the rule.
      state: its state.
      count: the number of the step.
      happens: whether the step does it, whatever the rule says; None where the rule
        decides.

    Returns:
      Whether the rule says that the step is due, and the new state.
    """
    due, after = rule.update(_overdue(state) if happens else state, count)
    if happens is False:
        after = optax.tree.where(due, _overdue(state), after)
    return due, after


def steps_before_due(state: Any) -> int | None:
    """The number of steps before the next that is due.

    None where the state does not tell: it is traced, or of a rule of the user's own.
    """
    if not isinstance(state, IntervalState):
        return None
    if not all(map(_is_known, state)):
        return None
    return max(int(state.interval) - int(state.waited) - 1, 0)


def _is_known(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and not isinstance(x, Tracer)


def _overdue(state: Any) -> Any:
    """The state of a rule whose next step is due, whatever the interval."""
    if isinstance(state, IntervalState):
        return state._replace(waited=jnp.full_like(state.waited, _LIMIT - 1))
    return state


def _positive(name: str, number: int) -> int:
    number = operator.index(number)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}.")
    if number > _LIMIT:
        raise ValueError(f"{name} must be at most 2**30, got {number}.")
    return number


def _intervals(
    first: Callable[[], ArrayLike],
    after: Callable[[IntervalState, Bool[Array, ""], Int32[Array, ""]], IntervalState],
    limits: tuple[int, int],
    *,
    aligned: bool = False,
    waited: int = 0,
) -> IntervalRule:
    """A rule of a first interval, and of what becomes of the interval in each step.

    The limits, from the shortest interval to the longest, hold for states of rules that
    had others, too.
    """

    def init_fn() -> IntervalState:
        start = first(), waited, 0
        return IntervalState(*(jnp.full([], n, jnp.int32) for n in start))

    def update_fn(
        state: IntervalState, count: Int32[Array, ""]
    ) -> tuple[Bool[Array, ""], IntervalState]:
        waited = state.waited + 1
        interval = jnp.clip(state.interval, *limits)
        due = waited >= interval
        if aligned:
            due |= count % interval == 0
        state = state._replace(interval=interval, waited=jnp.where(due, 0, waited))
        return due, after(state, due, count)

    return IntervalRule(init_fn, update_fn)
