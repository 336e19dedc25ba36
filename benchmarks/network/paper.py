"""The planner's model beside the clusters that the 1-bit Adam paper measured.

    python -m benchmarks.network.paper

prints the tables of `docs/notes/planner.md`. What goes in: the sizes of BERT-Large, one
link rate a network, and one GPU's computation, that of the single host's row. What is
predicted: every other row. "Gbit/s it takes" is the rate of a host's link, or of a
GPU's inside a host, at which the predicted bytes take the measured time.

References:
  Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, 2021: the profile of
  BERT-Large with 128 tokens (milliseconds), and the speed-up of 3.3
  DeepSpeed's `announcement <https://www.deepspeed.ai/2020/09/08/onebit-adam-blog-post
  .html>`_, 2020: 6.6 times in the compression stage; its throughputs are read off plots
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from benchmarks.page import table
from models import SIZES
from train.bert.objective import abstract_params
from train.plan.cluster import GIGABIT, GpuCluster
from train.plan.flops import step_flops
from train.plan.model import Arm, GpuWork, Model, arms
from train.plan.targets import GPUS

LATENCY = 20e-6

ETHERNET_RATE = 4.1 * GIGABIT
"""The rate by iperf between the hosts of the 40-gigabit Ethernet."""
INFINIBAND_RATE = 100 * GIGABIT
"""The InfiniBand's nominal rate; the paper gives no measured one."""

TOKENS = 128
FREEZE_SHARE = 23_000 / 152_000
"""Warm-up of BERT-Large with 128 tokens."""


class ProfiledStep(NamedTuple):
    """A measured step, in milliseconds.

    Attributes:
      network: 'Ethernet' or 'InfiniBand'.
      hosts: Hosts.
      gpus: V100s a host.
      batch: Sequences a GPU and micro-batch.
      accumulate: Micro-batches.
      forward: Forward passes.
      allreduce: The all-reduce of the gradients, in half precision.
      backward: Backward passes without the all-reduce.
      update: The optimizer.
    """

    network: str
    hosts: int
    gpus: int
    batch: int
    accumulate: int
    forward: float
    allreduce: float
    backward: float
    update: float

    @property
    def step(self) -> float:
        """The whole step."""
        return self.forward + self.allreduce + self.backward + self.update


PROFILE = (
    ProfiledStep("Ethernet", 16, 4, 1, 1, 36.65, 2205.86, 33.63, 74.96),
    ProfiledStep("Ethernet", 16, 4, 16, 1, 35.71, 2275.43, 60.81, 75.59),
    ProfiledStep("Ethernet", 16, 4, 16, 4, 137.80, 2259.36, 243.72, 74.92),
    ProfiledStep("Ethernet", 8, 4, 16, 1, 37.91, 2173.35, 60.71, 75.63),
    ProfiledStep("Ethernet", 4, 4, 16, 1, 36.94, 2133.24, 62.82, 76.85),
    ProfiledStep("Ethernet", 2, 4, 16, 1, 34.95, 1897.21, 61.23, 75.26),
    ProfiledStep("Ethernet", 1, 4, 16, 1, 35.99, 239.76, 59.95, 74.21),
    ProfiledStep("InfiniBand", 8, 8, 1, 1, 25.36, 316.18, 23.25, 58.49),
    ProfiledStep("InfiniBand", 8, 8, 16, 1, 32.81, 336.40, 59.99, 57.79),
    ProfiledStep("InfiniBand", 8, 8, 16, 4, 131.04, 339.52, 237.92, 56.91),
    ProfiledStep("InfiniBand", 4, 8, 16, 1, 33.45, 297.28, 56.81, 57.98),
    ProfiledStep("InfiniBand", 2, 8, 16, 1, 32.86, 183.74, 56.49, 58.60),
    ProfiledStep("InfiniBand", 1, 8, 16, 1, 32.74, 28.18, 59.73, 57.29),
)


HEADS = (
    "network",
    "hosts x V100",
    "batch x accumulation",
    "all-reduce, ms: measured",
    "predicted",
    "ratio",
    "Gbit/s it takes",
    "step, ms: measured",
    "predicted",
    "ratio",
)


def bert_large() -> Model:
    """The model of the profile."""
    leaves = tuple(jax.tree.leaves(abstract_params(SIZES["large"])))
    return Model("BERT large", leaves, step_flops(SIZES["large"], TOKENS))


def one_gpu(network: str, *, batch: int, accumulate: int) -> GpuWork:
    """A V100's computation, from the row of the single host of that network.

    The time of a micro-batch is taken to be in proportion to its sequences.
    """
    alone = next(p for p in PROFILE if p.network == network and p.hosts == 1)
    micro_batch = (alone.forward + alone.backward) / alone.batch * batch
    return GpuWork(
        micro_batch / 1e3, accumulate, alone.update / 1e3, GPUS["v100"].memory_rate
    )


def cluster(hosts: int, gpus: int, rate: float) -> GpuCluster:
    """A cluster of V100s."""
    return GpuCluster(hosts, gpus, rate, GPUS["v100"].inside_rate, LATENCY)


def predicted(profiled: ProfiledStep, model: Model, rate: float) -> Arm:
    """Adam with gradients in half precision where a step was profiled."""
    network, hosts, gpus, batch, accumulate, *_ = profiled
    work = one_gpu(network, batch=batch, accumulate=accumulate)
    return arms(model, work, cluster(hosts, gpus, rate))[1]


class Headline(NamedTuple):
    """A published speed-up over Adam with gradients in half precision.

    Attributes:
      name: The measurement.
      published: The number.
      predicted: The model's.
      assumptions: The model's inputs.
    """

    name: str
    published: float
    predicted: float
    assumptions: str


ANNOUNCED_ADAM, ANNOUNCED_ONEBIT = 130.0, 870.0
"""Sequences a second with 32 GPUs on Ethernet, read off the announcement's plot."""


def speed_up(predicted_arms: list[Arm], warmup_share: float) -> float:
    """The flat exchange of signs, DeepSpeed's, beside Adam in half precision."""
    adam = predicted_arms[1]
    return adam.seconds(warmup_share) / deepspeed_arm(predicted_arms).seconds(
        warmup_share
    )


def deepspeed_arm(predicted_arms: list[Arm]) -> Arm:
    """The form of 1-bit Adam that DeepSpeed has."""
    name = "1-bit Adam, flat, sign_mean"
    return next(arm for arm in predicted_arms if arm.name == name)


def announced_rate(model: Model) -> float:
    """The link rate at which Adam runs at the announcement's own throughput."""
    work = one_gpu("Ethernet", batch=16, accumulate=1)
    adam = arms(model, work, cluster(8, 4, 1.0))[1].compressed
    exchange = 32 * 16 / ANNOUNCED_ADAM - adam.compute - adam.update
    return adam.host_bytes / exchange


def headlines(model: Model) -> list[Headline]:
    """The published speed-ups, each within its own assumptions."""
    work = one_gpu("Ethernet", batch=16, accumulate=1)

    def at(hosts: int, rate: float) -> list[Arm]:
        return arms(model, work, cluster(hosts, 4, rate), warmup_itemsize=2)

    rate = announced_rate(model)
    announced = at(8, rate)
    return [
        Headline(
            "paper, end to end, 64 GPUs",
            3.3,
            speed_up(at(16, ETHERNET_RATE), FREEZE_SHARE),
            "4.1 Gbit/s, batch 16, warm-up 23,000 of 152,000 steps in half precision",
        ),
        Headline(
            "announcement, compression stage, 32 GPUs",
            6.6,
            speed_up(announced, 0.0),
            f"{rate / GIGABIT:.2f} Gbit/s, from Adam's own 130 sequences a second",
        ),
        Headline(
            "the same, sequences a second",
            ANNOUNCED_ONEBIT,
            32 * 16 / deepspeed_arm(announced).compressed.seconds,
            "the same",
        ),
        Headline(
            "announcement, compression stage, 32 GPUs",
            6.6,
            speed_up(at(8, ETHERNET_RATE), 0.0),
            "4.1 Gbit/s, the paper's",
        ),
    ]


def main() -> None:
    """Prints the tables."""
    model = bert_large()
    rates = {"Ethernet": ETHERNET_RATE, "InfiniBand": INFINIBAND_RATE}
    rows = [_cells(each, model, rates[each.network]) for each in PROFILE]
    print(table(HEADS, rows))
    published = [
        (
            each.name,
            f"{each.published:g}",
            f"{each.predicted:.3g}",
            f"{each.predicted / each.published:.2f}",
            each.assumptions,
        )
        for each in headlines(model)
    ]
    print()
    print(table(("", "published", "predicted", "ratio", "given"), published))


def _cells(profiled: ProfiledStep, model: Model, rate: float) -> tuple[str, ...]:
    step = predicted(profiled, model, rate).compressed
    exchange, whole = 1e3 * step.exchange, 1e3 * step.seconds
    sent, measured = step.host_bytes or step.gpu_bytes, profiled.allreduce
    return (
        profiled.network,
        f"{profiled.hosts} x {profiled.gpus}",
        f"{profiled.batch} x {profiled.accumulate}",
        f"{measured:,.0f}",
        f"{exchange:,.0f}",
        f"{exchange / measured:.2f}",
        f"{sent / measured * 1e3 / GIGABIT:.3g}",
        f"{profiled.step:,.0f}",
        f"{whole:,.0f}",
        f"{whole / profiled.step:.2f}",
    )


if __name__ == "__main__":
    main()
