"""Rules: when a variance is frozen, and which steps at intervals are due."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimizers import formulas

import onebit_jax
from onebit_jax import every, freeze_at, freeze_when_stable, growing_intervals

RESUMED = 14


def fired(rule, norms):
    """The steps after which the rule would freeze."""

    def body(state, item):
        now, state = rule.update(state, *item)
        return state, now

    steps = jnp.arange(1, len(norms) + 1, dtype=jnp.int32)
    _, fires = jax.lax.scan(body, rule.init(), (steps, jnp.asarray(norms, jnp.float32)))
    return list(np.flatnonzero(fires) + 1)


def test_freeze_at_fires_from_its_step_on():
    assert fired(freeze_at(3), [1.0] * 5) == [3, 4, 5]


@given(
    # XLA takes subnormal products for zeros and NumPy does not: no norm near them.
    st.lists(
        st.just(0.0) | st.floats(2.0**-100, 100, width=32), min_size=1, max_size=40
    ),
    st.integers(1, 12),
    st.integers(1, 20),
)
def test_freeze_when_stable_is_the_two_sided_ratio(norms, interval, min_steps):
    rule = freeze_when_stable(0.9, min_steps=min_steps, interval=interval)
    expected = []
    for t in range(1, len(norms) + 1):
        if t > interval and t >= min_steps:
            now, before = np.float32(norms[t - 1]), np.float32(norms[t - 1 - interval])
            if min(now, before) >= np.float32(0.9) * max(now, before):
                expected.append(t)
    assert fired(rule, norms) == expected
    assert not expected or expected[0] >= rule.earliest


def test_a_rising_variance_is_not_stable():
    """The paper's one-sided test passes at its first opportunity."""
    rising = [1 - 0.999**t for t in range(1, 3000)]
    assert fired(freeze_when_stable(min_steps=1, interval=500), rising[:1500]) == []
    assert fired(freeze_when_stable(min_steps=1, interval=500), rising) != []


def due_steps(rule, steps, then=None):
    """Those of a rule, or of one, and of another that goes on with its state."""
    state, update, due = rule.init(), jax.jit(rule.update), []
    for step in range(1, steps + 1):
        if then and step == RESUMED:
            update = jax.jit(then.update)
        now, state = update(state, jnp.int32(step))
        due += [step] if now else []
    return due


@pytest.mark.parametrize("double_after", [1, 2, 5])
@pytest.mark.parametrize("longest", [None, 1, 3, 8])
def test_intervals_grow_by_the_papers_formula(double_after, longest):
    due = due_steps(growing_intervals(double_after, longest=longest), 100)
    gaps = [min(2 ** (j // double_after), longest or 2**30) for j in range(1, len(due))]
    assert due[0] == 1
    assert list(np.diff(due)) == gaps
    assert due == formulas.due_steps(double_after, 100, longest or 2**30)


def test_intervals_may_be_even_or_grow_by_steps_or_be_aligned():
    assert due_steps(every(4), 13) == [4, 8, 12]
    assert due_steps(every(4, first=1), 13) == [1, 5, 9, 13]
    assert due_steps(every(4, first=7), 13) == [7, 11]
    by_steps = growing_intervals(3, counting="steps", longest=4)
    assert due_steps(by_steps, 17) == [1, 2, 3, 5, 9, 13, 17]
    aligned = growing_intervals(3, aligned=True)
    assert due_steps(aligned, 24) == [1, 2, 3, 4, 6, 8, 12, 16, 20, 24]


@pytest.mark.parametrize(
    ("saved", "goes_on", "due"),
    [
        (every(8), every(4), [8, 14, 18, 22]),
        (every(4), every(8), [4, 8, 12, 20]),
        (every(8).ending_at(13), every(8).ending_at(20), [8, 13, 20]),
        (growing_intervals(1), growing_intervals(1, longest=2), [1, 3, 7, 14, 16, 18]),
    ],
)
def test_a_rule_that_goes_on_with_anothers_state_keeps_its_own_limits(
    saved, goes_on, due
):
    found = due_steps(saved, 23, then=goes_on)
    assert found[: len(due)] == due


def test_a_rule_of_ones_own_ends_with_its_run():
    def update(state, count):
        return count % 4 == 0, state + 1

    rule = onebit_jax.IntervalRule(lambda: jnp.int32(0), update)
    assert due_steps(rule.ending_at(6), 9) == [4, 6, 8]


@pytest.mark.parametrize("longest", [None, 2**30, 2**29 + 1])
def test_intervals_do_not_overflow(longest):
    rule = growing_intervals(1, counting="steps", longest=longest)
    assert due_steps(rule, 70) == [1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: freeze_at(0), "at least one warm-up step"),
        (lambda: freeze_at(2**31), "at most 2[*][*]31 - 1 steps, which no run reaches"),
        (lambda: freeze_when_stable(1.5, min_steps=1), "threshold must lie between"),
        (lambda: freeze_when_stable(min_steps=2**31), "at most 2[*][*]31 - 1, got"),
        (lambda: freeze_when_stable(min_steps=1, interval=2**31), "at most 2[*][*]31"),
        (lambda: freeze_when_stable(min_steps=0), "must be at least 1"),
        (lambda: freeze_when_stable(min_steps=1, interval=0), "must be at least 1"),
        (lambda: every(0), "steps must be at least 1"),
        (lambda: growing_intervals(0), "double_after must be at least 1"),
        (lambda: growing_intervals(2, longest=0), "longest must be at least 1"),
        (lambda: growing_intervals(2, longest=2**30 + 1), "longest must be at most"),
        (lambda: growing_intervals(2, counting="rounds"), "counting must be 'times'"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "rule",
    [freeze_at(2**31 - 1), freeze_when_stable(min_steps=2**31 - 1, interval=1)],
)
def test_a_freeze_in_the_last_step_never_comes(rule):
    """As large a number as a schedule can be asked about."""

    def falling(step):
        return 1 / jnp.asarray(step, jnp.float32)

    norm = jnp.float32(1)
    for step, fires in ((2**31 - 2, False), (2**31 - 1, True)):
        state = jax.tree.map(jnp.ones_like, rule.init())
        assert bool(rule.update(state, jnp.int32(step), norm)[0]) == fires
    onebit_jax.onebit_adam(falling, onebit_jax.sign_mean("data"), rule)


@pytest.mark.parametrize(
    "make",
    [
        lambda: freeze_at(float("nan")),
        lambda: freeze_at(0.2),
        lambda: freeze_when_stable(min_steps=float("inf")),
        lambda: freeze_when_stable(min_steps=1, interval=1.5),
    ],
)
def test_steps_that_are_no_integers_are_refused(make):
    with pytest.raises(TypeError, match="integer"):
        make()


def test_intervals_follow_the_learning_rate():
    """Those that begin while it rises are as the first after that."""

    def rate(step):
        step = jnp.asarray(step, jnp.float32)
        return jnp.where(step < 4, 0.01 * step, jnp.where(step < 10, 0.1, 0.05))

    make = functools.partial(onebit_jax.intervals_by_learning_rate, rate)
    assert due_steps(make(0.2, warmup_steps=4), 30) == [4, 8, 12, 28]
    assert due_steps(make(0.2, warmup_steps=4, longest=9), 30) == [4, 8, 12, 21, 30]
    assert due_steps(make(0.05, shortest=3, warmup_steps=4), 9) == [3, 6, 9]
    # At a rate of zero nothing is due before the limit.
    assert (
        due_steps(onebit_jax.intervals_by_learning_rate(jnp.zeros_like, 1.0), 9) == []
    )
    with pytest.raises(TypeError, match="learning_rate must be a schedule"):
        onebit_jax.intervals_by_learning_rate(0.1, 0.2)
    with pytest.raises(ValueError, match="coefficient must be more than 0"):
        make(0.0)
    for steps in (-1, 2**31):
        with pytest.raises(ValueError, match="warmup_steps must be from 0 to 2"):
            make(0.2, warmup_steps=steps)
