"""The exchange by signs: its collectives, and what does not change its numbers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from virtual_workers import Workers, mesh_of

import onebit_jax


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
