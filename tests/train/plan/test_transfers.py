"""The planner counts the bytes of compiled steps, and those that leave a host."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

import onebit_jax
from models import SIZES
from onebit_jax import Transfer
from train.bert.objective import abstract_params
from train.plan.cluster import link_load
from train.plan.transfers import (
    exchange_transfers,
    growth_transfer,
    loss_transfer,
    mean_by_hosts,
)

# Whole blocks, parts of one, many; the last is just too small for a block.
SHAPES = {"a": (96, 1024), "b": (3000,), "c": (34,), "d": (40, 41), "e": (33,)}
PARAMS = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
LEAVES = tuple(PARAMS.values())
AXES = {"host": 4, "device": 2}
BOTH = tuple(AXES)
MEANS = {"sign_mean": onebit_jax.sign_mean, "count_mean": onebit_jax.count_mean}


def compiled_traffic(tx, **options):
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    mesh = Mesh(devices, BOTH, axis_types=(AxisType.Auto,) * 2)

    def loss(params, batch):
        squares = (jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        return sum(squares, start=jnp.float32(0)) * jnp.mean(batch)

    step = onebit_jax.data_parallel(loss, tx, mesh).step
    state = onebit_jax.abstract_state(tx, PARAMS, mesh)
    batch = jax.ShapeDtypeStruct((mesh.size, 1), jnp.float32)
    lowered = step.lower(PARAMS, state, batch, **options)
    return onebit_jax.traffic(lowered.compile(), mesh)


def payloads(transfers):
    """Bytes by collective and axes; XLA is free to combine those that are alike."""
    counted = Counter()
    for each in transfers:
        counted[each.op, each.axes] += each.bytes
    return counted


@pytest.mark.parametrize(
    ("name", "hierarchical"),
    [("sign_mean", True), ("count_mean", False)],
)
def test_an_exchange_is_that_of_a_compiled_step(name, hierarchical):
    exchange = MEANS[name]("host" if hierarchical else BOTH)
    if hierarchical:
        exchange = onebit_jax.hierarchical(exchange, "device")
    tx = onebit_jax.onebit_adam(1e-3, exchange, onebit_jax.freeze_at(10))
    compiled = compiled_traffic(tx, stage="compressed").collectives
    predicted = (
        *exchange_transfers(name, LEAVES, 4, 2, hierarchical=hierarchical),
        loss_transfer(AXES),
        growth_transfer(LEAVES),
    )
    assert payloads(compiled) == payloads(predicted)
    # The blocks of all leaves go together, not leaf by leaf.
    words = Counter((c.op, c.axes) for c in compiled if c.dtype == "u32")
    assert set(words.values()) == {1}


def test_the_exact_mean_is_that_of_a_compiled_step():
    with jax.numpy_dtype_promotion("standard"):
        exact = onebit_jax.exact_mean(BOTH)
        traffic = compiled_traffic(optax.chain(exact, optax.adam(1e-3)))
    (mean,) = exchange_transfers("exact_mean", LEAVES, 4, 2)
    assert payloads(traffic.collectives) == payloads([mean, loss_transfer(AXES)])
    half = tuple(jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in LEAVES)
    (mean_of_half,) = exchange_transfers("exact_mean", half, 4, 2)
    assert mean_of_half.bytes == mean.bytes / 2


def test_an_exact_mean_by_hosts_is_that_of_a_compiled_step():
    with jax.numpy_dtype_promotion("standard"):
        exact = onebit_jax.hierarchical(onebit_jax.exact_mean("host"), "device")
        traffic = compiled_traffic(optax.chain(exact, optax.adam(1e-3)))
    predicted = payloads([*mean_by_hosts(LEAVES, gpus=2), loss_transfer(AXES)])
    # Each leaf is filled up to a multiple of the GPUs.
    assert payloads(traffic.collectives) == pytest.approx(predicted, rel=1e-4)


@pytest.mark.parametrize("hosts", [2, 64])
def test_a_compressed_step_of_a_small_bert_sends_a_thirtieth(hosts):
    leaves = tuple(jax.tree.leaves(abstract_params(SIZES["mini"])))

    def sent(name):
        transfers = exchange_transfers(name, leaves, hosts, 1)
        return sum(link_load(each, hosts, 1).host_bytes for each in transfers)

    assert sent("exact_mean") / 32 < sent("sign_mean") < sent("exact_mean") / 30


def crossings(hosts, gpus, messages):
    """Bytes over each border, by counting messages: (to other hosts, inside)."""
    outside, inside = np.zeros(hosts), np.zeros(hosts * gpus)
    for source, target, size in messages:
        if source // gpus != target // gpus:
            outside[source // gpus] += size
        else:
            inside[source] += size
    return outside.max(), inside.max()


@given(st.integers(1, 5), st.integers(1, 4))
def test_what_leaves_a_host_is_what_its_messages_say(hosts, gpus):
    n = hosts * gpus
    size = 8 * 3 * 5 * 7 * n
    # A ring between hosts alone: of each first, second, ... GPU.
    beside = [
        (h * gpus + g, (h + 1) % hosts * gpus + g, (hosts - 1) * size / hosts)
        for h in range(hosts)
        for g in range(gpus)
        if hosts > 1
    ]
    messages = {
        ("all-to-all", BOTH): [
            (i, j, size / n) for i in range(n) for j in range(n) if i != j
        ],
        # A ring in the order of the hosts; n - 1 times a part, twice.
        ("all-reduce", BOTH): [
            (i, (i + 1) % n, 2 * (n - 1) * size / n) for i in range(n) if n > 1
        ],
        ("all-gather", ("host",)): beside,
        ("reduce-scatter", ("host",)): beside,
    }
    for (op, axes), each in messages.items():
        load = link_load(Transfer(op, size, axes), hosts, gpus)
        want = crossings(hosts, gpus, each)
        assert (load.host_bytes, load.inside_bytes) == pytest.approx(want)
        assert load.gpu_bytes == pytest.approx(sum(s for i, _, s in each if i == 0))


def test_messages_that_wait_for_one_another():
    def rounds(op, axes, hosts=16):
        return link_load(Transfer(op, 100, axes, times=3), hosts, 4).rounds

    assert rounds("all-reduce", BOTH) == 3 * 2 * math.log2(64)
    assert rounds("all-gather", ("host",)) == 3 * math.log2(16)
    assert rounds("all-to-all", BOTH) == 3
    assert rounds("all-to-all", BOTH, hosts=1) == rounds("all-reduce", ("device",)) == 0
