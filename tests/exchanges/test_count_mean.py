"""The exchange by counts against a dense simulation, and what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_workers import Workers, mesh_of

import onebit_jax
from pallas_kernels import digits_of_word, pack_digits, unpack_digits


@pytest.mark.parametrize("terms", range(1, 65))
def test_sums_of_digits_are_exact(terms):
    block_size, blocks = 256, 3
    digits = np.random.default_rng(terms).integers(0, 2, (terms, blocks, block_size))
    digits[:, 0] = 1  # the largest sums: each digit at its limit
    words = np.uint32(0)
    for own in digits:
        words = words + np.asarray(pack_digits(jnp.asarray(own, jnp.uint32), terms))
    assert words.shape == (blocks, -(-block_size // digits_of_word(terms)))
    counts = unpack_digits(jnp.asarray(words), terms, block_size)
    np.testing.assert_array_equal(counts, digits.sum(axis=0))


@pytest.mark.parametrize("terms", [255, 1625, 65535])
def test_sums_of_many_terms_do_not_overflow(terms):
    words = pack_digits(jnp.ones((1, 64), jnp.uint32), terms)
    assert np.all(np.asarray(words, np.uint64) * terms < 2**32)
    counts = unpack_digits(words * jnp.uint32(terms), terms, 64)
    np.testing.assert_array_equal(counts, np.full((1, 64), terms))


def shared_scale(scales):
    """The mean of float32 patterns, in Python's whole numbers."""
    used = [int(np.float32(s).view(np.uint32)) for s in scales if s > 0]
    if not used:
        return 0.0
    dropped = (len(scales) - 1).bit_length()
    mean = (sum(p >> dropped for p in used) << dropped) // len(used)
    return float(np.uint32(mean).view(np.float32))


def dense(x, block_size):
    """Counts exchange of one leaf: x is (workers, size), errors added."""
    agreed, sent = np.zeros(x.shape[1]), np.zeros(x.shape)
    for start in range(0, x.shape[1], block_size):
        part = x[:, start : start + block_size].astype(float)
        scale = shared_scale(np.mean(np.abs(part), axis=1))
        signs = np.where(part >= 0, 1, -1)
        sent[:, start : start + block_size] = scale * signs
        agreed[start : start + block_size] = scale * signs.mean(axis=0)
    return agreed, x - sent


@given(
    st.sampled_from([1, 2, 3, 4, 7, 8]),
    st.integers(1, 3000),
    st.sampled_from([32, 128, 1024]),
    st.integers(0, 2**32 - 1),
)
def test_equals_a_dense_simulation(workers, size, block_size, seed):
    rng = np.random.default_rng(seed)
    tx = onebit_jax.count_mean("data", block_size=block_size, exact_below=0)
    run = Workers(tx, jnp.zeros(size), mesh_of(workers))
    owed, largest = np.zeros(size), 0.0
    for _ in range(3):
        x = rng.normal(size=(workers, size)) * np.exp(rng.normal(size=(workers, 1)))
        x = x.astype(np.float32)
        before = np.asarray(run.state.worker_error.value)
        agreed = np.asarray(run.update(jnp.asarray(x)))
        expected, errors = dense(x + before, block_size)
        largest = max(largest, np.abs(expected).max(), np.abs(errors).max())
        close = {"rtol": 1e-5, "atol": 1e-5 * largest}
        np.testing.assert_allclose(agreed, expected, **close)
        np.testing.assert_allclose(run.state.worker_error.value, errors, **close)
        owed += x.mean(axis=0) - agreed
    residual = np.asarray(run.state.worker_error.value).mean(axis=0)
    np.testing.assert_allclose(owed, residual, rtol=0, atol=1e-5 * largest)


def test_a_worker_of_zeros_does_not_silence_the_others():
    run = Workers(onebit_jax.count_mean("data"), jnp.zeros(2048), mesh_of(4))
    x = jnp.ones((4, 2048)).at[0, :1024].set(0.0).at[:, 1024:].set(0.0)
    agreed = np.asarray(run.update(x))
    np.testing.assert_allclose(agreed[:1024], 1.0)
    assert not agreed[1024:].any(), "blocks of zeros stay zeros"


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_what_is_not_finite_reaches_every_worker(bad):
    scale = "rms" if bad == 1e30 else "mean_abs"  # its square alone overflows
    tx = onebit_jax.count_mean("data", block_size=64, scale=scale)
    run = Workers(tx, jnp.zeros(640), mesh_of(8))
    agreed = run.update(jnp.ones((8, 640)).at[5, 100].set(bad))
    for shard in agreed.addressable_shards:
        finite = np.isfinite(shard.data)
        assert not finite[64:128].any()
        assert finite[:64].all()
        assert finite[128:].all()


@pytest.mark.parametrize("bucket_size", [2**27, 4096])
def test_is_one_all_reduce_a_bucket(bucket_size):
    mesh = mesh_of(4)
    tx = onebit_jax.count_mean("data", bucket_size=bucket_size)
    run = Workers(tx, jnp.zeros(16 * 1024), mesh)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16 * 1024)), jnp.float32)
    compiled = run.compiled.lower(x, run.state, None).compile()
    found = onebit_jax.traffic(compiled, mesh).collectives
    number = sum(c.times for c in found)
    assert {c.op for c in found} == {"all-reduce"}
    # XLA may combine what it is given apart, and never splits it.
    assert number == 1 if bucket_size > x.shape[1] else 1 <= number <= 4
    words = -(-1024 // 13) + 2
    assert sum(c.bytes * c.times for c in found) == 16 * words * 4
    whole = Workers(onebit_jax.count_mean("data"), jnp.zeros(16 * 1024), mesh)
    np.testing.assert_array_equal(run.update(x), whole.update(x))


def test_adam_takes_it():
    tx = onebit_jax.onebit_adam(
        4e-2, onebit_jax.count_mean("data"), onebit_jax.freeze_at(20)
    )
    mesh = mesh_of(4)
    run = onebit_jax.data_parallel(lambda p, x: jnp.mean((x @ (p - 1)) ** 2), tx, mesh)
    params, state = run.init(jnp.zeros(64))
    for i in range(150):
        batch = jax.random.normal(jax.random.key(i), (32, 64))
        params, state, loss = run.step(params, state, batch)
        loss.block_until_ready()
    assert onebit_jax.metrics(state)["compressed"] == 1
    assert loss < 0.01 * 64, "64 is the loss at the start"
