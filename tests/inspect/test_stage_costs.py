"""Collectives of a traced update, in loops and conditions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from virtual_workers import mesh_of, mesh_over

import onebit_jax


def cost_of(update, workers=4, size=100):
    tx = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (update(g), s))
    (only,) = onebit_jax.stage_costs(tx, jnp.zeros(size), {"data": workers}).values()
    return onebit_jax.sent_bytes(only, {"data": workers})


def mean(x):
    return lax.pmean(x, "data")


ONCE = 2 * 3 * 400 // 4


@onebit_jax.optimizer_state
class NestedState(NamedTuple):
    steps: Any

    def steps_by_stage(self):
        return {"sends/quiet": self.steps, "sends": self.steps}


def test_a_nested_stage_without_a_collective_sends_what_the_outer_one_does():
    def init(params):
        del params
        return NestedState(jnp.int32(0))

    def update(updates, state, params=None, *, stage=None, **extra_args):
        del params, extra_args
        stages = {"sends": lambda: mean(updates)}
        return onebit_jax.run_stage(stages, state.steps, stage), state

    tx = optax.GradientTransformationExtraArgs(init, update)
    costs = onebit_jax.stage_costs(tx, jnp.zeros(100), {"data": 4})
    sent = {name: onebit_jax.sent_bytes(c, {"data": 4}) for name, c in costs.items()}
    assert sent == {"sends/quiet": ONCE, "sends": ONCE}


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


def test_a_mean_that_nothing_reads_costs_nothing():
    """Compilers leave it out; that of a frozen layer is one."""

    both = jax.jit(lambda g: (mean(g), mean(2 * g)))
    assert cost_of(lambda g: both(g)[0]) == ONCE
    assert cost_of(lambda g: sum(both(g))) == 2 * ONCE
    assert cost_of(lambda g: lax.cond(mean(g)[0] > 0, both, both, g)[0]) == 2 * ONCE

    def printed(g):
        jax.debug.print("{}", mean(2 * g))
        return mean(g)

    assert cost_of(printed) == 2 * ONCE


def test_what_a_loop_carries_is_read_by_its_next_turn():
    def chained(g):
        first = mean(g)
        (_, last), _ = lax.scan(
            lambda c, _: ((mean(g) + c[1], c[0]), None), (first, first), length=5
        )
        return last

    assert cost_of(chained) == 6 * ONCE


def test_frozen_layers_cost_what_the_compiled_step_sends():
    params = {"body": jnp.zeros((64, 64)), "head": jnp.zeros((64, 16))}
    head = onebit_jax.onebit_adam(
        1e-2, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(1)
    )
    body = optax.chain(onebit_jax.exact_mean("data"), optax.set_to_zero())
    tx = optax.partition({"t": head, "f": body}, {"body": "f", "head": "t"})
    mesh = mesh_of(4)
    run = onebit_jax.data_parallel(
        lambda p, x: jnp.mean((x @ p["body"] @ p["head"] - 1) ** 2), tx, mesh
    )
    traffic = onebit_jax.traffic(
        run.step.lower(*run.init(params), jnp.ones((4, 64))).compile(), mesh
    )
    loss = 2 * 3 * 4 // 4
    for stage, transfers in onebit_jax.stage_costs(tx, params, mesh.shape).items():
        sent = onebit_jax.sent_bytes(transfers, mesh.shape)
        assert traffic.sent_bytes(stage) == sent + loss, stage


def test_parts_of_a_partition_are_each_in_a_stage_of_their_own():
    """The order of the labels is not that of the updates, nor of the state."""
    params = {"u": jnp.zeros((32, 48)), "v": jnp.zeros((32, 40)), "w": jnp.zeros(9)}
    sign_mean, freeze_at = onebit_jax.sign_mean, onebit_jax.freeze_at
    parts = {
        "v": onebit_jax.onebit_adam(1e-2, sign_mean("data"), freeze_at(6)),
        "u": onebit_jax.onebit_lamb(1e-2, onebit_jax.count_mean("data"), freeze_at(2)),
        "w": optax.chain(onebit_jax.exact_mean("data"), optax.sgd(0.1)),
    }

    def costs_of(tx, params):
        costs = onebit_jax.stage_costs(tx, params, {"data": 4})
        return {s: onebit_jax.sent_bytes(c, {"data": 4}) for s, c in costs.items()}

    alone = {name: costs_of(parts[name], {name: params[name]}) for name in parts}
    costs = costs_of(optax.partition(parts, {name: name for name in parts}), params)
    assert list(costs) == [f"{part}:{stage}" for part in "uv" for stage in alone[part]]
    for stage, sent in alone["v"].items():
        assert costs[f"v:{stage}"] == sent
    for stage, sent in alone["u"].items():
        # Every step sends the exact mean, which is counted once.
        assert costs[f"u:{stage}"] == sent + alone["w"]["every"]


def test_steps_of_several_parts_are_counted_apart():
    parts = {"first": NestedState(1), "second": NestedState(2)}
    steps = onebit_jax.steps_by_stage({"first": NestedState(1), "other": ({},)})
    assert steps == {"sends/quiet": 1, "sends": 1}
    steps = onebit_jax.steps_by_stage(parts)
    assert list(steps.items()) == [
        ("first:sends/quiet", 1),
        ("first:sends", 1),
        ("second:sends/quiet", 2),
        ("second:sends", 2),
    ]
    steps = onebit_jax.steps_by_stage([*parts.values()])
    assert steps["0:sends"] == 1
    assert steps["1:sends"] == 2


def test_whose_stage_it_is_must_be_seen():
    """One stage alone is run without a choice by the state."""

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        stages = {"sends": lambda: jax.tree.map(mean, updates)}
        return onebit_jax.run_stage(stages, state.steps), state

    part = optax.GradientTransformationExtraArgs(
        lambda params: NestedState(jnp.int32(0)), update
    )
    tx = optax.partition({"a": part, "b": part}, {"u": "a", "v": "b"})
    with pytest.raises(ValueError, match="cannot tell whose stage 'sends' is: compile"):
        onebit_jax.stage_costs(tx, {"u": jnp.zeros(3), "v": jnp.zeros(3)}, {"data": 4})


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_they_are_the_same_whatever_mesh_is_set(kind):
    mesh = mesh_over({"data": 2, "model": 2}, kind)
    tx = onebit_jax.onebit_adam(
        0.1, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(2)
    )
    costs = onebit_jax.stage_costs(tx, jnp.zeros((64, 8)), mesh.shape)
    with jax.set_mesh(mesh):
        assert onebit_jax.stage_costs(tx, jnp.zeros((64, 8)), mesh.shape) == costs


def test_a_mesh_in_the_place_of_its_sizes_is_refused():
    exact = onebit_jax.exact_mean("data")
    with pytest.raises(TypeError, match="got a Mesh: give"):
        onebit_jax.stage_costs(exact, jnp.zeros(8), mesh_of(2))
