"""The exchange in two levels, against a dense simulation and by its bytes."""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from virtual_workers import Workers

import onebit_jax


def mesh_of(hosts, devices):
    chosen = np.array(jax.devices()[: hosts * devices]).reshape(hosts, devices)
    types = (AxisType.Auto, AxisType.Auto)
    return jax.sharding.Mesh(chosen, ("host", "device"), axis_types=types)


def in_order(blocks, sizes, block_size):
    """Leaves' values out of an array of blocks in the order of the leaves."""
    flat, start, leaves = np.asarray(blocks, np.float32).reshape(-1), 0, []
    for size in sizes:
        leaves.append(flat[start : start + size])
        padded = -(-size // block_size) * block_size
        assert not flat[start + size : start + padded].any(), "padding owes nothing"
        start += padded
    assert not flat[start:].any(), "padding owes nothing"
    return leaves


@given(
    st.sampled_from([(4, 2), (2, 4), (2, 1), (1, 4), (3, 2)]),
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.sampled_from([32, 64, 256]),
    st.sampled_from(["rms", "mean_abs"]),
    st.integers(0, 2**32 - 1),
)
def test_equals_a_dense_simulation(shape, sizes, block_size, scale, seed):
    hosts, devices = shape
    rng = np.random.default_rng(seed)
    tx = onebit_jax.hierarchical(
        onebit_jax.sign_mean("host", block_size=block_size, scale=scale, exact_below=0),
        within="device",
    )
    run = Workers(tx, [jnp.zeros(n) for n in sizes], mesh_of(*shape))
    for _ in range(2):
        values = [rng.normal(size=(hosts, devices, n)) for n in sizes]
        values = [v.astype(np.float32) for v in values]
        before = [np.asarray(e) for e in jax.tree.leaves(run.state)]
        agreed = run.update(
            [jnp.asarray(v.reshape(hosts * devices, -1)) for v in values]
        )
        errors = [in_order(e, sizes, block_size) for e in before[0]]
        owed = in_order(before[1], sizes, block_size)
        after = run.state.worker_error.value
        new_errors = [in_order(e, sizes, block_size) for e in after]
        new_owed = in_order(run.state.server_error.value, sizes, block_size)
        for i, value in enumerate(values):
            expected, host_errors, server_error, undecided = dense.exchange(
                value.mean(axis=1),
                np.stack([e[i] for e in errors]),
                owed[i],
                block_size,
                scale,
            )
            # The mean inside a host is rounded in another order here.
            largest = np.abs(value).max() + np.abs(expected).max()
            near = (np.abs(value.mean(axis=1)) < 1e-5 * largest).any(axis=0)
            decided = ~(undecided | near)
            close = {"rtol": 1e-5, "atol": 2e-5 * largest}
            np.testing.assert_allclose(
                np.asarray(agreed[i])[decided], expected[decided], **close
            )
            np.testing.assert_allclose(
                np.stack([e[i] for e in new_errors])[:, decided],
                host_errors[:, decided],
                **close,
            )
            np.testing.assert_allclose(
                new_owed[i][decided], server_error[decided], **close
            )


@pytest.mark.parametrize("wire", [onebit_jax.sign_mean, onebit_jax.count_mean])
def test_what_was_not_sent_is_the_residual(wire):
    rng, sizes = np.random.default_rng(0), [3000, 100, 7]
    tx = onebit_jax.hierarchical(
        wire("host", block_size=64, exact_below=10), within="device"
    )
    run = Workers(tx, [jnp.zeros(n) for n in sizes], mesh_of(4, 2))
    owed = [np.zeros(n) for n in sizes]
    for _ in range(20):
        values = [rng.normal(size=(8, n)).astype(np.float32) for n in sizes]
        agreed = run.update([jnp.asarray(v) for v in values])
        for total, value, mean in zip(owed, values, agreed, strict=True):
            total += value.astype(float).mean(axis=0) - np.asarray(mean, float)
            assert len({s.data.tobytes() for s in mean.addressable_shards}) == 1
    error = np.asarray(run.state.worker_error.value, float).mean(axis=0)
    residual = error.reshape(-1)
    if run.state.server_error.value is not None:
        residual += np.asarray(run.state.server_error.value, float).reshape(-1)
    # Tiny leaves go exactly: they owe nothing.
    for total, part in zip(
        owed, (*in_order(residual, sizes[:2], 64), np.zeros(7)), strict=True
    ):
        np.testing.assert_allclose(total, part, rtol=0, atol=1e-4)


@pytest.mark.parametrize("devices", [2, 4])
def test_hosts_exchange_a_share_of_the_bits(devices):
    hosts, size = 8 // devices, 2**20
    mesh = mesh_of(hosts, devices)
    params = jnp.zeros(size)

    def sent(tx):
        run = Workers(tx, params, mesh)
        x = jax.ShapeDtypeStruct((8, size), jnp.float32)
        compiled = run.compiled.lower(x, run.state, None).compile()
        return onebit_jax.traffic(compiled, mesh)

    flat = 2 * (hosts - 1) / hosts * 4 * size
    two_levels = sent(
        onebit_jax.hierarchical(onebit_jax.sign_mean("host"), within="device")
    )
    ratio = two_levels.sent_bytes(axis="host") * devices / flat
    assert ratio == pytest.approx(33 / 32 / 32, rel=0.01)
    inside = {(c.op, c.dtype) for c in two_levels.collectives if c.axes == ("device",)}
    assert inside == {("reduce-scatter", "f32"), ("all-gather", "u32")}
    # What is gathered inside a host is packed: 33 bits for 32 values.
    gathered = [c for c in two_levels.collectives if c.op == "all-gather"]
    assert all(c.bytes <= size / 8 * 33 / 32 for c in gathered)


def test_adam_takes_it_and_agrees_with_the_flat_one():
    mesh = mesh_of(4, 2)
    exchange = onebit_jax.hierarchical(onebit_jax.sign_mean("host"), within="device")
    tx = onebit_jax.onebit_adam(4e-2, exchange, onebit_jax.freeze_at(20))
    run = onebit_jax.data_parallel(lambda p, x: jnp.mean((x @ (p - 1)) ** 2), tx, mesh)
    params, state = run.init(jnp.zeros(64))
    for i in range(150):
        batch = jax.random.normal(jax.random.key(i), (32, 64))
        params, state, loss = run.step(params, state, batch)
        loss.block_until_ready()
    assert onebit_jax.metrics(state)["compressed"] == 1
    onebit_jax.assert_replicas_identical(params, mesh)
    assert loss < 0.01 * 64, "64 is the loss at the start"


@pytest.mark.parametrize("after", [(2, 4), (2, 2), (8, 1), (4, 2)])
def test_resizing_preserves_what_is_owed(after):
    sizes = [3000, 100]
    tx = onebit_jax.hierarchical(
        onebit_jax.sign_mean("host", block_size=64), within="device"
    )
    params = [jnp.zeros(n) for n in sizes]
    run = Workers(tx, params, mesh_of(4, 2))
    rng = np.random.default_rng(0)
    for _ in range(2):
        run.update([jnp.asarray(rng.normal(size=(8, n)), jnp.float32) for n in sizes])
    resized = onebit_jax.resize(run.state, tx, params, run.mesh, mesh_of(*after))

    def owed(state):
        mean = np.asarray(state.worker_error.value, float).mean(axis=0)
        whole = (mean, state.server_error.value)
        return [in_order(x, sizes, 64) for x in whole]

    for old, new in zip(owed(run.state), owed(resized), strict=True):
        for x, y in zip(old, new, strict=True):
            assert x.any()
            np.testing.assert_allclose(y, x, rtol=1e-6, atol=1e-7)
    again = Workers(tx, params, mesh_of(*after))
    again.state = resized
    n = after[0] * after[1]
    again.update([jnp.ones((n, size)) for size in sizes])


@pytest.mark.parametrize(
    "other",
    [
        onebit_jax.count_mean("host", block_size=64),
        onebit_jax.sign_mean("host", block_size=64, exact_below=500),
        onebit_jax.sign_mean("host", block_size=64, error_dtype=jnp.bfloat16),
    ],
)
def test_resizing_with_another_exchange_is_refused(other):
    params = [jnp.zeros(3000), jnp.zeros(100)]
    tx = onebit_jax.hierarchical(
        onebit_jax.sign_mean("host", block_size=64), within="device"
    )
    state = onebit_jax.init(tx, params, mesh_of(4, 2))
    wrong = onebit_jax.hierarchical(other, within="device")
    with pytest.raises(ValueError, match="its options and the parameters"):
        onebit_jax.resize(state, wrong, params, mesh_of(2, 2))


def test_tiny_leaves_alone_can_be_resized_and_saved():
    tx = onebit_jax.hierarchical(onebit_jax.sign_mean("host"), within="device")
    state = onebit_jax.init(tx, [jnp.zeros(3)], mesh_of(2, 2))
    assert all(x.size for x in jax.tree.leaves(state)), "Orbax saves nothing empty"
    onebit_jax.resize(state, tx, [jnp.zeros(3)], mesh_of(4, 2))


def test_what_has_no_wire_format_is_refused():
    with pytest.raises(TypeError, match="sign_mean\\('host'\\)"):
        onebit_jax.hierarchical(onebit_jax.exact_mean("host"), within="device")
    with pytest.raises(ValueError, match="must differ"):
        onebit_jax.hierarchical(onebit_jax.sign_mean("host"), within="host")
