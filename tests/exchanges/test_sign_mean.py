"""The exchange by signs: its collectives, and what does not change its numbers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import Codec
from onebit_jax.exchanges.sign_mean import SignCodec


def values(seed, workers, size):
    x = np.random.default_rng(seed).normal(size=(workers, size))
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize(("bucket_size", "buckets"), [(4 * 256, 11), (5000, 3)])
def test_a_bucket_is_as_large_as_it_may_be(bucket_size, buckets):
    tree = {"a": values(0, 4, 9000), "b": jnp.ones((4, 2000))}
    params = jax.tree.map(lambda x: x[0], tree)
    tx = onebit_jax.sign_mean("data", block_size=256, bucket_size=bucket_size)
    found = Workers(tx, params, mesh_of(4)).traffic(tree).collectives
    # Each of four workers serves 11 of 36 + 8 blocks.
    assert sum(c.times for c in found if c.op == "all-to-all") == buckets
    assert sum(c.bytes for c in found if c.op == "all-to-all") == 44 * 9 * 4


@pytest.mark.parametrize("workers", [2, 4])
def test_small_leaves_go_together_and_the_rest_in_two_collectives(workers):
    params = {"a": jnp.zeros(33), "b": jnp.zeros(5), "large": jnp.zeros(3000)}
    run = Workers(onebit_jax.sign_mean("data"), params, mesh_of(workers))
    tree = jax.tree.map(lambda p: jnp.zeros((workers, *p.shape)), params)
    there = "all-gather" if workers == 2 else "all-to-all"
    ops = [c.op for c in run.traffic(tree).collectives]
    assert sorted(ops) == sorted(["all-reduce", there, "all-gather"])


def test_meshes_of_both_kinds_agree():
    auto, explicit = (
        Workers(onebit_jax.sign_mean("data"), jnp.zeros(1000), mesh_of(4, kind))
        for kind in (AxisType.Auto, AxisType.Explicit)
    )
    x = values(1, 4, 1000)
    chex.assert_trees_all_equal(
        jax.device_get(explicit.update(x)), jax.device_get(auto.update(x))
    )


@pytest.mark.parametrize("scale", ["rms", "mean_abs"])
def test_in_fewer_passes_it_encodes_the_same(scale):
    codec, rng = SignCodec(64, scale), np.random.default_rng(0)
    value, error, other, server = rng.normal(size=(4, 100)).astype(np.float32)
    counts = jnp.array([64, 36], jnp.int32)
    server = jnp.pad(server, (0, 28))

    @functools.partial(jax.jit, static_argnums=0)
    def passes(method):
        words, new = method.encode_with_error(codec, value, error)
        sent = jnp.stack([words, method.encode_with_error(codec, other, error)[0]])
        agreed, new_server = method.average_and_encode(codec, sent, server, counts)
        decoded = method.decode_flat(codec, agreed, 100, jnp.float32)
        return new, new_server, decoded

    chex.assert_trees_all_close(passes(SignCodec), passes(Codec), atol=1e-5)
