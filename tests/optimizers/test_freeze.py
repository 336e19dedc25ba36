"""Freeze rules: when they fire and when they must not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebit_jax import freeze_at, freeze_when_stable


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: freeze_at(0),
        lambda: freeze_when_stable(1.5, min_steps=1),
        lambda: freeze_when_stable(min_steps=0),
        lambda: freeze_when_stable(min_steps=1, interval=0),
    ],
)
def test_arguments_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match=r"at least|between"):
        make()


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
