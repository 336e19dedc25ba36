"""The 1-bit exchange against a dense simulation, and the properties it promises."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import exchange
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType
from virtual_workers import Workers, mesh_of

import onebit_jax

WORKERS = st.sampled_from([1, 2, 3, 4, 8])
BLOCKS = st.sampled_from([2**k for k in range(5, 15)])
SIZES = st.one_of(st.integers(1, 300), st.integers(1, 100_000))
DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])


def values(rng, workers, size, dtype):
    """Gradients as they are: magnitudes from block to block, and zeros."""
    magnitude = np.exp(rng.normal(size=size // 50 + 1)).repeat(50)[:size]
    x = rng.normal(size=(workers, size)) * magnitude + 0.3 * magnitude
    x[:, rng.random(size) < 0.05] = 0
    return jnp.asarray(x, dtype)


def server_error_of(state, size):
    return np.asarray(state.server_error.value, np.float32).reshape(-1)[:size]


@given(
    WORKERS,
    SIZES,
    BLOCKS,
    DTYPES,
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    st.sampled_from(["rms", "mean_abs"]),
    st.integers(0, 2**32 - 1),
)
@example(4, 6402, 128, jnp.bfloat16, jnp.float32, "mean_abs", 3)
def test_equals_a_dense_simulation(
    workers, size, block_size, dtype, error_dtype, scale, seed
):
    rng = np.random.default_rng(seed)
    tx = onebit_jax.sign_mean(
        "data",
        block_size=block_size,
        scale=scale,
        error_dtype=error_dtype,
        exact_below=0,
    )
    run = Workers(tx, jnp.zeros(size, dtype), mesh_of(workers))
    # Of the dtypes that results and errors are rounded to.
    unit = float(jnp.finfo(dtype).eps)
    error_unit = float(jnp.finfo(error_dtype).eps)
    for _ in range(3):
        x = values(rng, workers, size, dtype)
        before = run.state
        agreed = run.update(x)
        expected, worker_errors, server_error, undecided = exchange(
            np.asarray(x, np.float32),
            np.asarray(before.worker_error.value, np.float32),
            server_error_of(before, size),
            block_size,
            scale,
        )
        # A guard against a test of nothing. Without an error yet, a block's means are
        # of 2**workers kinds at most: where one of these cancels, its values all do.
        kind = min(block_size, size) / 2 ** (workers - 2) if workers > 1 else 0
        assert undecided.mean() < 1e-3 + (2 + kind) / size
        decided = ~undecided
        largest = np.abs(expected).max()
        np.testing.assert_allclose(
            np.asarray(agreed, np.float32)[decided],
            expected[decided],
            rtol=unit + 1e-5,
            atol=1e-6 * largest,
        )
        np.testing.assert_allclose(
            np.asarray(run.state.worker_error.value, np.float32),
            worker_errors,
            rtol=error_unit,
            atol=1e-5 * np.abs(worker_errors).max(),
        )
        np.testing.assert_allclose(
            server_error_of(run.state, size)[decided],
            server_error[decided],
            rtol=error_unit,
            atol=1e-5 * largest,
        )


@given(WORKERS, SIZES, BLOCKS, st.integers(0, 2**32 - 1))
def test_what_was_not_sent_is_the_residual(workers, size, block_size, seed):
    rng = np.random.default_rng(seed)
    tx = onebit_jax.sign_mean("data", block_size=block_size, exact_below=0)
    run = Workers(tx, jnp.zeros(size), mesh_of(workers))
    owed, largest = np.zeros(size), 0.0
    for _ in range(50):
        x = values(rng, workers, size, jnp.float32)
        largest = max(largest, float(jnp.abs(x).max()))
        agreed = run.update(x)
        owed += np.mean(np.asarray(x, float), axis=0) - np.asarray(agreed, float)
        copies = {s.data.tobytes() for s in agreed.addressable_shards}
        assert len(copies) == 1, "replicas differ"
    residual = np.mean(np.asarray(run.state.worker_error.value, float), axis=0)
    residual += server_error_of(run.state, size)
    # A few roundings a step, of numbers as large as values and errors.
    largest += np.abs(np.asarray(run.state.worker_error.value)).max()
    np.testing.assert_allclose(owed, residual, rtol=0, atol=50 * 2**-22 * largest)
    padding = np.asarray(run.state.server_error.value).reshape(-1)[size:]
    assert not padding.any()


def test_leaves_do_not_share_scales_and_keep_their_places():
    rng = np.random.default_rng(0)
    tree = {
        "large": 1e3 * rng.normal(size=(4, 5, 7)),
        "small": {"a": 1e-3 * rng.normal(size=(4, 40)), "b": rng.normal(size=(4,))},
    }
    tree = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), tree)
    together = Workers(
        onebit_jax.sign_mean("data", block_size=32, exact_below=0), params, mesh_of(4)
    )
    agreed = together.update(tree)
    for path, leaf in jax.tree.leaves_with_path(tree):
        alone = Workers(
            onebit_jax.sign_mean("data", block_size=32, exact_below=0),
            jnp.zeros(leaf.shape[1:]),
            mesh_of(4),
        )
        got = dict(jax.tree.leaves_with_path(agreed))[path]
        np.testing.assert_array_equal(got, alone.update(leaf))
    # One value is its own scale: it is exchanged exactly.
    exact = np.mean(tree["small"]["b"])
    np.testing.assert_allclose(agreed["small"]["b"], exact, rtol=2.0)


def test_zeros_stay_exact_zeros():
    run = Workers(onebit_jax.sign_mean("data"), jnp.zeros(3000), mesh_of(4))
    x = jnp.zeros((4, 3000)).at[:, 2500].set(1.0)
    agreed = np.asarray(run.update(x))
    assert not agreed[:2048].any()
    assert agreed[2500] > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_not_finite_reaches_every_worker(bad):
    scale = "rms" if bad == 1e30 else "mean_abs"  # its square alone overflows
    run = Workers(
        onebit_jax.sign_mean("data", block_size=64, scale=scale),
        jnp.zeros(640),
        mesh_of(8),
    )
    x = jnp.ones((8, 640)).at[5, 100].set(bad)
    agreed = run.update(x)
    for shard in agreed.addressable_shards:
        finite = np.isfinite(shard.data)
        assert not finite[64:128].any()
        assert finite[:64].all()
        assert finite[128:].all()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_meshes_of_both_kinds_agree(axis_type):
    x = values(np.random.default_rng(1), 4, 1000, jnp.float32)
    run = Workers(onebit_jax.sign_mean("data"), jnp.zeros(1000), mesh_of(4, axis_type))
    auto = Workers(onebit_jax.sign_mean("data"), jnp.zeros(1000), mesh_of(4))
    np.testing.assert_array_equal(run.update(x), auto.update(x))


def test_two_axes_are_one_team_of_workers():
    x = values(np.random.default_rng(2), 8, 1000, jnp.float32)
    mesh = jax.make_mesh((2, 4), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    both = Workers(onebit_jax.sign_mean(("host", "device")), jnp.zeros(1000), mesh)
    flat = Workers(onebit_jax.sign_mean("data"), jnp.zeros(1000), mesh_of(8))
    for _ in range(2):
        np.testing.assert_array_equal(both.update(x), flat.update(x))


def test_nothing_to_exchange_is_no_error():
    for tree in ({}, {"a": jnp.zeros((4, 0))}, {"a": jnp.zeros((4, 0, 3)), "b": None}):
        params = jax.tree.map(lambda x: x[0], tree)
        run = Workers(onebit_jax.sign_mean("data"), params, mesh_of(4))
        agreed = run.update(tree)
        assert jax.tree.structure(agreed) == jax.tree.structure(tree)
        assert all(x.size == 0 for x in jax.tree.leaves(agreed))


def test_an_empty_leaf_does_not_disturb_the_others():
    x = values(np.random.default_rng(3), 4, 100, jnp.float32)
    tree = {"empty": jnp.zeros((4, 0)), "full": x}
    run = Workers(
        onebit_jax.sign_mean("data"),
        {"empty": jnp.zeros(0), "full": jnp.zeros(100)},
        mesh_of(4),
    )
    alone = Workers(onebit_jax.sign_mean("data"), jnp.zeros(100), mesh_of(4))
    np.testing.assert_array_equal(run.update(tree)["full"], alone.update(x))


def test_bfloat16_errors_take_half_the_memory():
    sizes = {
        dtype: sum(
            leaf.nbytes
            for leaf in jax.tree.leaves(
                onebit_jax.init(
                    onebit_jax.sign_mean("data", error_dtype=dtype),
                    jnp.zeros(10_000),
                    mesh_of(4),
                )
            )
        )
        for dtype in ("float32", "bfloat16")
    }
    assert sizes["float32"] == 2 * sizes["bfloat16"]


@pytest.mark.parametrize("bucket_size", [1, 5000, 2**14])
def test_buckets_change_nothing_but_the_number_of_collectives(bucket_size):
    rng, mesh = np.random.default_rng(0), mesh_of(4)
    tree = {"a": values(rng, 4, 9000, jnp.float32), "b": jnp.ones((4, 2000))}
    params = jax.tree.map(lambda x: x[0], tree)
    one = Workers(onebit_jax.sign_mean("data", block_size=256), params, mesh)
    tx = onebit_jax.sign_mean("data", block_size=256, bucket_size=bucket_size)
    several = Workers(tx, params, mesh)
    for _ in range(2):
        chex.assert_trees_all_equal(several.update(tree), one.update(tree))
    chex.assert_trees_all_equal(several.state, one.state)
    compiled = several.compiled.lower(tree, several.state, None).compile()
    found = onebit_jax.traffic(compiled, mesh).collectives
    number = sum(c.times for c in found if c.op == "all-to-all")
    served = -(-(36 + 8) // 4)
    assert number == min(served, -(-served * 4 * 256 // bucket_size))


@pytest.mark.parametrize("decay", [None, 0.9])
def test_leaves_too_small_for_a_block_go_exactly_and_together(decay):
    rng, mesh = np.random.default_rng(0), mesh_of(4)
    sizes = {"a": 33, "b": 5, "large": 3000, "limit": 34}
    tree = {
        k: jnp.asarray(rng.normal(size=(4, n)), jnp.float32) for k, n in sizes.items()
    }
    params = {k: jnp.full(n, 0.5) for k, n in sizes.items()}
    exchange = onebit_jax.sign_mean("data", block_size=1024)
    state = onebit_jax.init(exchange, params, mesh)
    specs = onebit_jax.state_specs(state)

    def update(tree, state, momentum):
        own = jax.tree.map(lambda x: x[0], tree)
        if decay is None:
            return exchange.update(own, state)
        return exchange.exchange_momentum(own, momentum, decay, state)

    split = jax.P("data")
    compiled = (
        jax.jit(
            jax.shard_map(
                update,
                mesh=mesh,
                in_specs=(split, specs, jax.P()),
                out_specs=(jax.P(), specs),
            )
        )
        .lower(tree, state, params)
        .compile()
    )
    agreed, state = jax.block_until_ready(compiled(tree, state, params))
    for name, x in tree.items():
        mean = np.mean(x, axis=0)
        if decay is not None:
            mean = decay * 0.5 + (1 - decay) * mean
        exact = np.allclose(agreed[name], mean, rtol=1e-5, atol=1e-6)
        assert exact == (sizes[name] <= 33), name
        assert np.any(state.worker_error.value[name]) != exact
    ops = [c.op for c in onebit_jax.traffic(compiled, mesh).collectives]
    assert sorted(ops) == ["all-gather", "all-reduce", "all-to-all"]
