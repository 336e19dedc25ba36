"""The exchange by counts: what its words hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from virtual_workers import Workers, mesh_of

import onebit_jax
from pallas_kernels import digits_of_word, pack_digits, unpack_digits


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 7, 8, 15, 16, 33, 64])
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


@pytest.mark.parametrize("bucket_size", [2**27, 4096])
def test_is_one_all_reduce_a_bucket(bucket_size):
    run = Workers(
        onebit_jax.count_mean("data", bucket_size=bucket_size),
        jnp.zeros(16 * 1024),
        mesh_of(4),
    )
    found = run.traffic(jax.ShapeDtypeStruct((4, 16 * 1024), jnp.float32)).collectives
    number = sum(c.times for c in found)
    assert {c.op for c in found} == {"all-reduce"}
    # XLA may combine what it is given apart, and never splits it.
    assert number == 1 if bucket_size == 2**27 else 1 <= number <= 4
    words = -(-1024 // 13) + 2
    assert sum(c.bytes * c.times for c in found) == 16 * words * 4


@pytest.mark.parametrize(("workers", "last"), [(2, 2.0**-22), (4, 2.0**-21)])
def test_a_scale_keeps_all_bits_but_the_last_few(workers, last):
    """Of so many patterns of 31 bits the sum is a word."""
    tx = onebit_jax.count_mean("data", block_size=32, scale="mean_abs", exact_below=0)
    mean = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")
    value = jnp.zeros((workers, 32)).at[:, 0].set(32 * (1 + last))
    np.testing.assert_array_equal(jax.jit(mean)(value), jnp.full_like(value, 1 + last))
