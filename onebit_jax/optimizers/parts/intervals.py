"""Rules for steps at intervals: when a variance is refreshed, when workers agree."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
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


class IntervalState(NamedTuple):
    """State of `growing_intervals`.

    Attributes:
      interval: steps from one due step to the next.
      waited: steps since the last that was due.
      counted: due steps, or with counting='steps' all steps, since the interval last
        doubled.
    """

    interval: Int32[Array, ""]
    waited: Int32[Array, ""]
    counted: Int32[Array, ""]


def every(steps: int) -> IntervalRule:
    """The last of every so many steps is due.

    Args:
      steps: from 1 to 2³⁰; 1 for every step.

    Returns:
      A rule.

    Raises:
      ValueError: if `steps` is out of range.
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
    first = _positive("steps", steps)
    return _intervals(first, None, _LIMIT, "times", aligned=False)


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
    return _intervals(
        1, _positive("double_after", double_after), limit, counting, aligned=aligned
    )


def _positive(name: str, number: int) -> int:
    number = operator.index(number)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}.")
    if number > _LIMIT:
        raise ValueError(f"{name} must be at most 2**30, got {number}.")
    return number


def _intervals(
    first: int,
    double_after: int | None,
    limit: int,
    counting: str,
    *,
    aligned: bool,
) -> IntervalRule:
    def init_fn() -> IntervalState:
        return IntervalState(*(jnp.full([], n, jnp.int32) for n in (first, 0, 0)))

    def update_fn(
        state: IntervalState, count: Int32[Array, ""]
    ) -> tuple[Bool[Array, ""], IntervalState]:
        waited = state.waited + 1
        interval = state.interval
        due = (count % interval == 0) if aligned else (waited >= interval)
        waited = jnp.where(due, 0, waited)
        if double_after is None:
            return due, IntervalState(interval, waited, state.counted)
        counts = due if counting == "times" else jnp.bool(True)
        counted = state.counted + counts.astype(jnp.int32)
        doubles = counted >= double_after
        # Twice the limit may be no int32.
        doubled = jnp.where(interval > limit // 2, limit, 2 * interval)
        return due, IntervalState(
            jnp.where(doubles, doubled, interval),
            waited,
            jnp.where(doubles, 0, counted),
        )

    return IntervalRule(init_fn, update_fn)
