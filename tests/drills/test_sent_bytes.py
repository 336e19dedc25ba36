"""The bytes that leave a host in a run, beside those that are counted."""

import jax
import jax.numpy as jnp
import optax
from drills.cluster import OWN_STEPS, Cluster
from runs import PROMOTION

import onebit_jax
from benchmarks.network import hosts as network_hosts

INTERVAL, ROUNDS, WIDTH = 8, 3, 2**16


def test_local_steps_send_what_is_counted(hosts, tmp_path):
    """Of the whole run, the start and the heartbeats of its processes among it."""
    tx = onebit_jax.local_steps(
        optax.adam(1e-2), onebit_jax.sign_mean("data"), onebit_jax.every(INTERVAL)
    )
    shape = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    with PROMOTION:
        costs = onebit_jax.stage_costs(tx, shape, {"data": 2})
    a_round = onebit_jax.sent_bytes(costs["sync"], {"data": 2})
    # Both ways half of the blocks, of 32 words and a scale.
    assert (a_round, costs["local"]) == (64 * WIDTH // 1024 * 4 * 33, ())
    flags = "--interval", INTERVAL, "--width", WIDTH, "--pause", 0
    before = network_hosts.sent(hosts)
    with Cluster(hosts, tmp_path, [OWN_STEPS, *flags]) as run:
        assert run.end() == [0, 0], run.said()
    for (first, _), (last, _) in zip(before, network_hosts.sent(hosts), strict=True):
        assert 1 <= (last - first) / (ROUNDS * a_round) < 1.1
