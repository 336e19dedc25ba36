"""The exchange in two levels: what crosses hosts, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from deepspeed_exchange import DeepSpeedSignMean
from virtual_workers import Workers, mesh_of, mesh_over

import onebit_jax


def test_hosts_exchange_a_share_of_the_bits():
    hosts, devices, size = 4, 2, 2**16
    tx = onebit_jax.hierarchical(onebit_jax.sign_mean("host"), within="device")
    run = Workers(tx, jnp.zeros(size), mesh_over({"host": hosts, "device": devices}))
    found = run.traffic(jax.ShapeDtypeStruct((8, size), jnp.float32))
    flat = 2 * (hosts - 1) / hosts * 4 * size
    ratio = found.sent_bytes(axis="host") * devices / flat
    assert ratio == pytest.approx(33 / 32 / 32, rel=0.01)
    inside = {(c.op, c.dtype) for c in found.collectives if c.axes == ("device",)}
    assert inside == {("reduce-scatter", "f32"), ("all-gather", "u32")}
    # What is gathered inside a host is packed: 33 bits for 32 values.
    gathered = [c for c in found.collectives if c.op == "all-gather"]
    assert all(c.bytes <= size / 8 * 33 / 32 for c in gathered)


def test_one_host_freezes_no_variance():
    tx = onebit_jax.hierarchical(onebit_jax.sign_mean("host"), within="device")
    adam = onebit_jax.onebit_adam(0.1, tx, onebit_jax.freeze_at(1))
    run = Workers(adam, jnp.ones(64), mesh_over({"host": 1, "device": 2}))
    for _ in range(2):
        run.update(jnp.ones((2, 64)))
    assert onebit_jax.metrics(run.state)["frozen_at"] == 0


def test_a_state_of_tiny_leaves_alone_can_be_saved():
    tx = onebit_jax.hierarchical(onebit_jax.sign_mean("host"), within="device")
    state = onebit_jax.init(tx, [jnp.zeros(3)], mesh_over({"host": 2, "device": 2}))
    assert all(x.size for x in jax.tree.leaves(state)), "Orbax saves nothing empty"


def test_axes_that_are_both_between_and_inside_hosts_are_refused():
    with pytest.raises(ValueError, match="must differ"):
        onebit_jax.hierarchical(onebit_jax.sign_mean("host"), within="host")


def test_what_is_no_exchange_is_refused():
    with pytest.raises(TypeError, match="sign_mean\\('host'\\)"):
        onebit_jax.hierarchical(optax.identity(), within="device")
    twice = onebit_jax.hierarchical(onebit_jax.exact_mean("host"), within="device")
    assert twice.axes == ("host", "device")
    per_shard = onebit_jax.per_shard(onebit_jax.sign_mean("host"), jax.P("model"))
    for exchange in twice, per_shard:
        with pytest.raises(TypeError, match="cannot be put inside one another"):
            onebit_jax.hierarchical(exchange, "core")


def test_any_exchange_is_given_a_share_of_the_means_of_hosts():
    hosts, devices, size = 3, 2, 70
    tx = onebit_jax.hierarchical(DeepSpeedSignMean(("host",)), "device")
    run = Workers(tx, jnp.zeros((7, 10)), mesh_over({"host": hosts, "device": devices}))
    alone = Workers(DeepSpeedSignMean(), jnp.zeros(35), mesh_of(hosts))
    states, expected = [alone.state] * devices, [None] * devices
    for step in range(3):
        x = np.random.default_rng(step).normal(size=(hosts, devices, size))
        agreed = run.update(jnp.asarray(x.reshape(-1, 7, 10), jnp.float32))
        shares = jnp.split(jnp.asarray(x.mean(axis=1), jnp.float32), devices, axis=1)
        for i, share in enumerate(shares):
            alone.state = states[i]
            expected[i], states[i] = alone.update(share), alone.state
        np.testing.assert_allclose(
            agreed.reshape(-1), np.concatenate(expected), rtol=1e-5
        )


def test_shares_of_another_exchange_are_not_cut_anew():
    """DeepSpeed pads each share: joined, they are not the leaf."""
    tx = onebit_jax.hierarchical(DeepSpeedSignMean(("host",)), "device")
    old, new = (mesh_over({"host": 2, "device": devices}) for devices in (2, 4))
    params = jnp.zeros(70)
    state = onebit_jax.init(tx, params, old)
    with pytest.raises(ValueError, match="keep the other axes"):
        onebit_jax.resize(state, tx, params, old, new)
