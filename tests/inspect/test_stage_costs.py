"""Collectives of a traced update, in loops and conditions."""

import jax.numpy as jnp
import optax
import pytest
from jax import lax

import onebit_jax


def cost_of(update, workers=4, size=100):
    tx = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (update(g), s))
    (only,) = onebit_jax.stage_costs(tx, jnp.zeros(size), {"data": workers}).values()
    return onebit_jax.sent_bytes(only, {"data": workers})


def mean(x):
    return lax.pmean(x, "data")


ONCE = 2 * 3 * 400 // 4


def test_a_loop_of_known_length_counts_each_time():
    def update(g):
        sums, _ = lax.scan(lambda c, _: (c + mean(g), None), 0 * mean(g), length=5)
        return sums

    assert cost_of(update) == 6 * ONCE


def test_of_a_condition_the_branch_that_sends_most_counts():
    def update(g):
        return lax.cond(
            mean(g)[0] > 0,
            lambda: mean(mean(g) + g),
            lambda: mean(g),
        )

    assert cost_of(update) == 3 * ONCE


def test_a_branch_that_sends_most_may_have_the_smaller_payload():
    """With 8 workers 600 bytes are reduced by sending 1050, 1024 gathered by 896."""

    def update(g):
        return lax.cond(
            g[0] > 0,
            lambda: jnp.sum(lax.pmean(g[:150], "data")),
            lambda: jnp.sum(lax.all_gather(g[:32], "data", to="invarying")),
        )

    assert cost_of(update, workers=8, size=200) == 2 * 7 * 600 // 8


def test_a_loop_of_unknown_length_is_refused():
    def update(g):
        return lax.while_loop(
            lambda m: jnp.max(m) > 1, lambda m: m / 2 + mean(g), mean(g)
        )

    with pytest.raises(ValueError, match="how often a loop with a collective runs"):
        cost_of(update)
