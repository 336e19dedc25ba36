"""Formulas of a training step's cost on a cluster, with each optimizer.

A step is computation, then an exchange, then the update; nothing overlaps but what
`GpuWork.overlap` says. Every time is bytes by a stated rate or operations by a stated
rate; nothing is fitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from train.core.exchange import EXCHANGES
from train.plan.transfers import (
    PERIOD,
    exchange_transfers,
    growth_transfer,
    loss_transfer,
    mean_by_hosts,
)

if TYPE_CHECKING:
    from train.plan.cluster import GpuCluster, LinkLoad

ADAM_BYTES = 28.0
"""Bytes a parameter that Adam moves in memory: the parameter, both moments and the
gradient read, all but the gradient written, float32."""

FLAT = {"Adam, float32 gradients": 4, "Adam, bfloat16 gradients": 2}
"""Plain Adam with a ring over all GPUs, and the bytes of a gradient's value."""

BY_HOSTS = {f"{name}, hierarchical": itemsize for name, itemsize in FLAT.items()}
"""The same with exact means inside each host first."""

BASELINES = (*FLAT, *BY_HOSTS)
"""The names of plain Adam's arms."""


class Model(NamedTuple):
    """A model that is trained.

    Attributes:
      name: Its name.
      leaves: Shapes and dtypes of its parameters.
      flops: FLOP of one sequence, forward and backward.
    """

    name: str
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    flops: float

    @property
    def parameters(self) -> int:
        """Their number, d."""
        return sum(leaf.size for leaf in self.leaves)

    def gradients(self, itemsize: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Its gradients, of 4 or 2 bytes a value."""
        dtype = {4: jnp.float32, 2: jnp.bfloat16}[itemsize]
        return tuple(jax.ShapeDtypeStruct(x.shape, dtype) for x in self.leaves)


class GpuWork(NamedTuple):
    """A GPU's work in a step beside exchanging.

    Attributes:
      micro_batch: Seconds of the forward and backward pass of one micro-batch.
      accumulate: Micro-batches a step.
      adam: Seconds of Adam's update.
      memory_rate: Bytes a second from and to memory.
      overlap: Share of the last backward pass, two thirds of a micro-batch, behind
        which an exact exchange of gradients hides.
    """

    micro_batch: float
    accumulate: int
    adam: float
    memory_rate: float
    overlap: float = 0.0

    @property
    def hidden(self) -> float:
        """Seconds of an exact exchange of gradients that the backward pass hides."""
        return self.overlap * 2 / 3 * self.micro_batch


class Step(NamedTuple):
    """A step of one stage.

    Attributes:
      compute: Seconds of forward and backward passes.
      update: Seconds of the optimizer's arithmetic.
      exchange: Seconds of the network that nothing hides.
      hidden: Seconds of the network that a backward pass can hide.
      gpu_bytes: Bytes that a GPU sends.
      host_bytes: Bytes that a host sends to others.
      loads: The collectives.
    """

    compute: float
    update: float
    exchange: float
    hidden: float
    gpu_bytes: float
    host_bytes: float
    loads: tuple[LinkLoad, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.update + self.exchange

    @property
    def network_share(self) -> float:
        """The exchange's share of the step."""
        return self.exchange / self.seconds

    def over(self, cluster: GpuCluster) -> Step:
        """The step over links of other rates between the same hosts and GPUs."""
        seconds = sum(map(cluster.seconds, self.loads))
        return self._replace(exchange=max(0.0, seconds - self.hidden))


class Arm(NamedTuple):
    """An optimizer with an exchange.

    Attributes:
      name: Its name.
      warmup: A step before the freeze.
      compressed: A step after it; for Adam the same.
    """

    name: str
    warmup: Step
    compressed: Step

    def over(self, cluster: GpuCluster) -> Arm:
        """The arm over links of other rates between the same hosts and GPUs."""
        return self._replace(
            warmup=self.warmup.over(cluster), compressed=self.compressed.over(cluster)
        )

    def seconds(self, warmup_share: float) -> float:
        r"""A step's seconds, on average over a run: w t_w + (1 - w) t_c."""
        return (
            warmup_share * self.warmup.seconds
            + (1 - warmup_share) * self.compressed.seconds
        )


def compression_bytes(workers: int, shards: int = 1) -> float:
    r"""Bytes a parameter that the compressed stage moves in memory.

    .. math::
      16.1 + \left( \frac18 + \frac{8.1}{n} \right) + 20.1

    to compress the momentum (gradient, momentum and error read, error and bits
    written), to average and compress again, and to update (bits, variance, parameter
    and, for the lead, the momentum of the step before read, momentum and parameter
    written). Divided between the GPUs of a host, a pass makes each GPU's momentum and
    lays it out (gradient and momentum read, momentum written: 12), of which each then
    compresses a share (error and share read, error and bits written: 12.1) and averages
    a share.

    Args:
      workers: n.
      shards: GPUs that share the work, 1 where each compresses everything.

    Returns:
      Their number.
    """
    average, update = 1 / 8 + 8.1 / workers, 20.1
    if shards > 1:
        return 12.0 + (12.1 + average) / shards + update
    return 16.1 + average + update


def update_seconds(model: Model, work: GpuWork, workers: int, shards: int = 1) -> float:
    """Seconds of 1-bit Adam's update: Adam's, and of the bytes that it moves more."""
    more = compression_bytes(workers, shards) - ADAM_BYTES
    return work.adam + more * model.parameters / work.memory_rate


def arms(model: Model, work: GpuWork, cluster: GpuCluster) -> list[Arm]:
    """All optimizers that there are for a cluster.

    Args:
      model: The model.
      work: What a GPU computes.
      cluster: Hosts and links.

    Returns:
      Adam with gradients of 4 and 2 bytes, then 1-bit Adam with `sign_mean` and
      `count_mean`; both flat, and hierarchical where there are several hosts of several
      GPUs. 1-bit Adam's warm-up is that of the trainers.
    """
    several = cluster.hosts > 1 and cluster.gpus > 1
    adams = []
    for name, itemsize in (FLAT | BY_HOSTS if several else FLAT).items():
        step = _exact_step(model, work, cluster, itemsize, name in BY_HOSTS)
        adams.append(Arm(name, step, step))
    onebit = [
        Arm(
            f"1-bit Adam, {'hierarchical' if hierarchical else 'flat'}, {exchange}",
            _onebit_step(model, work, cluster, "quantized_mean", hierarchical),
            _onebit_step(model, work, cluster, exchange, hierarchical),
        )
        for hierarchical in ((False, True) if several else (False,))
        for exchange in EXCHANGES
    ]
    return adams + onebit


def _exact_step(
    model: Model,
    work: GpuWork,
    cluster: GpuCluster,
    itemsize: int,
    hierarchical: bool,
) -> Step:
    gradients = model.gradients(itemsize)
    if hierarchical:
        mean = mean_by_hosts(gradients, cluster.gpus)
    else:
        mean = exchange_transfers("exact_mean", gradients, cluster.hosts, cluster.gpus)
    return _step(work, work.adam, cluster.loads(mean), cluster, work.hidden)


def _onebit_step(
    model: Model,
    work: GpuWork,
    cluster: GpuCluster,
    exchange: str,
    hierarchical: bool,
) -> Step:
    hosts, gpus = cluster.hosts, cluster.gpus
    transfers = exchange_transfers(
        exchange, model.leaves, hosts, gpus, hierarchical=hierarchical
    )
    workers, shards = (hosts, gpus) if hierarchical else (hosts * gpus, 1)
    update = update_seconds(model, work, workers, shards)
    loads = cluster.loads(transfers)
    if exchange in EXCHANGES:
        (growth,) = cluster.loads([growth_transfer(model.leaves)])
        loads = *loads, growth.each_step(PERIOD)
    return _step(work, update, loads, cluster)


def _step(
    work: GpuWork,
    update: float,
    exchange: tuple[LinkLoad, ...],
    cluster: GpuCluster,
    hidden: float = 0.0,
) -> Step:
    loads = *exchange, *cluster.loads([loss_transfer(cluster.axis_sizes)])
    return Step(
        work.accumulate * work.micro_batch,
        update,
        0.0,
        hidden,
        sum(load.gpu_bytes for load in loads),
        sum(load.host_bytes for load in loads),
        loads,
    ).over(cluster)
