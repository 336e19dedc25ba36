"""Packing and the three operations against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels as pk


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([1, 2, 8, 32]))
def test_packing_is_planar(seed, blocks, width):
    x = np.random.default_rng(seed).normal(size=(blocks, 32, width)).astype(np.float32)
    x[np.abs(x) < 0.1] = 0
    words = np.asarray(pk.pack_signs(jnp.asarray(x)))
    for bit in range(32):
        np.testing.assert_array_equal((words >> bit) & 1, x[:, bit, :] >= 0)
    np.testing.assert_array_equal(
        pk.unpack_signs(jnp.asarray(words), jnp.full(blocks, 2.0)),
        np.where(x >= 0, 2, -2),
    )


def test_signs_of_the_numbers_that_have_none():
    x = -jnp.ones((1, 32, 1))
    x = x.at[0, :3, 0].set(jnp.array([0.0, -0.0, jnp.nan]))
    assert int(pk.pack_signs(x)[0, 0]) == 0b0011


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000, 1024, 1025])
@pytest.mark.parametrize("scale", ["rms", "mean_abs"])
def test_compress_then_decompress_leaves_the_error(size, scale):
    rng = np.random.default_rng(size)
    value, error = rng.normal(size=(2, size)).astype(np.float32)
    words, scales, rest = pk.compress(
        jnp.asarray(value), jnp.asarray(error), block_size=128, scale=scale
    )
    sent = pk.decompress(words, scales, size)
    np.testing.assert_allclose(sent + rest, value + error, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(np.sign(sent), np.where(value + error >= 0, 1, -1))
    for b in range(-(-size // 128)):
        x = (value + error)[b * 128 : (b + 1) * 128].astype(float)
        expected = np.sqrt(np.mean(x**2)) if scale == "rms" else np.mean(np.abs(x))
        np.testing.assert_allclose(scales[b], expected, rtol=1e-6)


def test_the_servers_padding_is_nothing():
    rng = np.random.default_rng(0)
    words = jnp.asarray(rng.integers(0, 2**32, (3, 4, 2), dtype=np.uint32))
    scales = jnp.asarray(rng.random((3, 4)), jnp.float32)
    counts = jnp.array([64, 10, 1, 0], jnp.int32)
    _, new_scales, error = pk.average_and_recompress(
        words, scales, jnp.zeros(256), counts
    )
    bits = (np.asarray(words)[:, :, None, :] >> np.arange(32)[None, None, :, None]) & 1
    sent = np.where(bits == 1, 1, -1) * np.asarray(scales, float)[:, :, None, None]
    mean = sent.mean(0).reshape(4, 64)
    for block, count in enumerate(counts):
        values = mean[block, : int(count)]
        expected = np.sqrt(np.mean(values**2)) if count else 0.0
        np.testing.assert_allclose(new_scales[block], expected, rtol=1e-6)
        assert not np.asarray(error).reshape(4, 64)[block, int(count) :].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_errors_keep_their_dtype(dtype):
    _, _, error = pk.compress(jnp.ones(40), jnp.zeros(40, dtype), block_size=32)
    assert error.dtype == dtype
