"""Training steps compiled whole for 512 GPUs, on a machine without any.

`make test-aot` installs the compiler. These prove memory and collectives, not speed.
"""

import os

import pytest

from train.plan.command import cluster_of, model_of
from train.plan.compile import compile_step
from train.plan.config import PlanConfig
from train.plan.transfers import exchange_transfers

if "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ:
    pytest.skip("run by make test-aot", allow_module_level=True)

CLUSTER = {"rate": 100.0, "hosts": 64, "gpus": 8, "gpu": "h200", "remat": True}
MATRIX = 2 * 5120 * 5120
# Now and at the freeze, of 25 layers' matrices: float32.
ROWS = 8_000_000


@pytest.fixture(scope="module")
def large():
    return compile_step(PlanConfig(model="large", **CLUSTER))


@pytest.fixture(scope="module")
def seven_billion():
    config = PlanConfig(model="7b", seq=512, batch=8, fsdp=True, **CLUSTER)
    return config, compile_step(config)


def over(found, axis, stage="compressed"):
    return [
        c
        for c in found["collectives"]
        if axis in c["axes"] and c["stage"] in (stage, "every")
    ]


def between_hosts_go_packed_words(found):
    """And the loss, of all devices."""
    for collective in over(found, "host"):
        if collective["bytes"] > 1000:
            assert collective["dtype"] == "u32"
            assert collective["axes"] == ["host"]
            assert collective["op"] in ("all-to-all", "all-gather")


def predicted(config):
    """Bytes from a GPU to the same GPU of the other hosts."""
    cluster, leaves = cluster_of(config), model_of(config).leaves
    transfers = exchange_transfers(
        config.exchange, leaves, config.hosts, config.gpus, hierarchical=True
    )
    loads = cluster.loads(each for each in transfers if each.axes == ("host",))
    return sum(load.gpu_bytes for load in loads)


def test_bert_large_is_compiled_for_its_hosts(large):
    assert large["mesh"] == {"host": 64, "device": 8}


def test_bert_large_fits_with_room_for_a_larger_batch(large):
    assert large["memory"]["fits"]
    assert large["memory"]["together"] < 20e9
    assert large["memory"]["outputs"] < 1.01 * large["memory"]["in_place"]


def test_bert_large_sends_packed_words_between_hosts(large):
    config = PlanConfig(model="large", **CLUSTER)
    between_hosts_go_packed_words(large)
    sent = sum(c["sent_bytes"] for c in over(large, "host"))
    # The model's leaves are stacked there, which makes fewer partial blocks.
    assert sent == pytest.approx(predicted(config), rel=0.01)
    exact = sum(c["sent_bytes"] for c in over(large, "host", "warmup"))
    assert sent < exact / 8 / 30


def test_seven_billion_parameters_fit(seven_billion):
    _, found = seven_billion
    assert found["memory"]["fits"]
    # Parameters, moments and errors, 16 bytes, an eighth of them each.
    assert found["memory"]["arguments"] == pytest.approx(16 * 7.03e9 / 8, rel=0.01)


def test_seven_billion_parameters_send_packed_words_between_hosts(seven_billion):
    config, found = seven_billion
    between_hosts_go_packed_words(found)
    sent = sum(c["sent_bytes"] for c in over(found, "host"))
    assert sent == pytest.approx(predicted(config), rel=0.01)


def test_seven_billion_parameters_gather_weights_and_nothing_else(seven_billion):
    _, found = seven_billion
    # The compressed stage gathers the mean squares of rows inside the host, and
    # nothing else.
    own = [c for c in over(found, "device") if c["stage"] == "compressed"]
    assert sum(c["bytes"] for c in own) < ROWS
    # Weights, in bfloat16, for three passes, and their gradients, once; were it
    # activations, it would be four times as much.
    weights = 7 / 8 * 2 * 7.03e9
    inside = sum(c["sent_bytes"] for c in over(found, "device"))
    assert 2.8 * weights < inside < 3.3 * weights
    big = [c for c in over(found, "device") if c["bytes"] > MATRIX and c not in own]
    assert {c["dtype"] for c in big if c["op"] == "all-gather"} <= {"bf16"}
