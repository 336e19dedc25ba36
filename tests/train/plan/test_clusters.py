"""Predictions stand beside the clusters that the 1-bit Adam paper measured.

Tang et al., 1-bit Adam, arXiv:2102.02888: the profile of BERT-Large with 128 tokens on
V100s, four a host, and the speed-up of 3.3 of a whole run. DeepSpeed's announcement:
6.6 times in the compression stage.
"""

import jax
import pytest

from models import SIZES
from train.bert.objective import abstract_params
from train.plan.cluster import GIGABIT, GpuCluster
from train.plan.flops import step_flops
from train.plan.model import GpuWork, Model, arms
from train.plan.targets import GPUS

pytestmark = pytest.mark.slow
RATE = 4.1 * GIGABIT
"""As iperf measured it between the hosts of the 40-gigabit Ethernet."""
UPDATE = 74.21e-3
MICRO_BATCH = (35.99 + 59.95) / 1e3
"""Forward and backward pass of 16 sequences on the single host: the row given."""


@pytest.fixture(scope="module")
def bert():
    leaves = tuple(jax.tree.leaves(abstract_params(SIZES["large"])))
    return Model("BERT large", leaves, step_flops(SIZES["large"], 128))


def predicted(bert, hosts, rate=RATE, batch=16, accumulate=1):
    """Adam with gradients in half precision, and the form that DeepSpeed has."""
    gpu = GPUS["v100"]
    work = GpuWork(MICRO_BATCH * batch / 16, accumulate, UPDATE, gpu.memory_rate)
    cluster = GpuCluster(hosts, 4, rate, gpu.inside_rate, 20e-6)
    found = {arm.name: arm for arm in arms(bert, work, cluster)}
    return found["Adam, bfloat16 gradients"], found["1-bit Adam, flat, sign_mean"]


@pytest.mark.parametrize(
    ("hosts", "batch", "accumulate", "allreduce", "rest"),
    [
        (16, 1, 1, 2205.86, 36.65 + 33.63 + 74.96),
        (16, 16, 1, 2275.43, 35.71 + 60.81 + 75.59),
        (16, 16, 4, 2259.36, 137.80 + 243.72 + 74.92),
        (8, 16, 1, 2173.35, 37.91 + 60.71 + 75.63),
        (4, 16, 1, 2133.24, 36.94 + 62.82 + 76.85),
        (2, 16, 1, 1897.21, 34.95 + 61.23 + 75.26),
    ],
)
def test_the_papers_ethernet_rows_within_a_quarter(
    bert, hosts, batch, accumulate, allreduce, rest
):
    adam, _ = predicted(bert, hosts, batch=batch, accumulate=accumulate)
    assert 1e3 * adam.warmup.exchange == pytest.approx(allreduce, rel=0.25)
    assert 1e3 * adam.warmup.seconds == pytest.approx(allreduce + rest, rel=0.25)


def test_the_published_speed_ups_within_their_assumptions(bert):
    adam, onebit = predicted(bert, hosts=16)
    # A warm-up in half precision takes Adam's step; 23,000 steps of 152,000.
    share = 23 / 152
    rest = (1 - share) * onebit.compressed.seconds
    whole_run = adam.warmup.seconds / (share * adam.warmup.seconds + rest)
    assert whole_run == pytest.approx(3.3, rel=0.1)
    # The link rate at which Adam makes the announcement's own 130 sequences a second.
    adam, _ = predicted(bert, hosts=8)
    exchange = 32 * 16 / 130 - adam.warmup.compute - adam.warmup.update
    adam, onebit = predicted(bert, hosts=8, rate=adam.warmup.host_bytes / exchange)
    speed_up = adam.warmup.seconds / onebit.compressed.seconds
    assert speed_up == pytest.approx(6.6, rel=0.25)
