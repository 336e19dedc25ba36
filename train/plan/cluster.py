"""A cluster's links, and what collectives put on them.

Of a payload of b bytes in a group of n GPUs a GPU sends what rings send, as
`onebit_jax.traffic` counts it: 2 b (n - 1) / n for an all-reduce, b (n - 1) / n for a
reduce-scatter, an all-to-all, and an all-gather of a result of b bytes. What of that
leaves a host depends on the form: a ring over all GPUs enters and leaves each host
once; of an all-to-all everything for other hosts leaves, from each GPU of the host.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from train.core.mesh import DEVICE, HOST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from onebit_jax import Transfer

GIGABIT = 1e9 / 8
"""Bytes in a gigabit."""


class LinkLoad(NamedTuple):
    """The load that a collective, or several alike, put on the links.

    Attributes:
      transfer: The collective.
      gpu_bytes: Bytes that a GPU sends.
      host_bytes: Bytes that a host sends to others.
      inside_bytes: Bytes that a GPU sends to others of its host.
      rounds: Messages between hosts that wait for one another.
    """

    transfer: Transfer
    gpu_bytes: float
    host_bytes: float
    inside_bytes: float
    rounds: float

    def each_step(self, period: int) -> LinkLoad:
        """The load of an average step, of a collective in one step of a period."""
        return LinkLoad(self.transfer, *(part / period for part in self[1:]))


class GpuCluster(NamedTuple):
    """Hosts with GPUs.

    Attributes:
      hosts: How many.
      gpus: GPUs a host.
      rate: Bytes a second that all the network cards of a host send together.
      inside_rate: Bytes a second that a GPU sends to others of its host.
      latency: Seconds that a message between hosts takes beside its bytes.
    """

    hosts: int
    gpus: int
    rate: float
    inside_rate: float
    latency: float

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Hosts and GPUs of each, by the names of the axes of their mesh."""
        return {HOST: self.hosts, DEVICE: self.gpus}

    def loads(self, transfers: Iterable[Transfer]) -> tuple[LinkLoad, ...]:
        """The loads that collectives put on the links of this cluster."""
        return tuple(link_load(each, self.hosts, self.gpus) for each in transfers)

    def seconds(self, load: LinkLoad) -> float:
        r"""The time that a collective takes.

        .. math:: \max\left(\frac{b_{host}}{rate}, \frac{b_{inside}}{rate_{inside}}
          \right) + rounds \cdot latency
        """
        wire = load.host_bytes / self.rate, load.inside_bytes / self.inside_rate
        return max(wire) + load.rounds * self.latency


def link_load(transfer: Transfer, hosts: int, gpus: int) -> LinkLoad:
    """The load that a collective puts on the links of a cluster.

    Args:
      transfer: Over hosts, over the GPUs of a host, or over both.
      hosts: How many.
      gpus: GPUs of each, which stand side by side in every ring.

    Returns:
      The bytes by link, and the rounds: of a ring those of a tree, the fewest,
      ⌈log2 n⌉ a pass; of an all-to-all one, as all messages go at once.

    Example:
      >>> from onebit_jax import Transfer
      >>> from train.plan.cluster import link_load
      >>> link_load(Transfer('all-reduce', 800, ('host', 'device')), 2, 4)[1:]
      (1400.0, 1400.0, 1400.0, 6)
    """
    op, payload, axes, times = transfer
    neighbours = gpus if DEVICE in axes else 1
    n = neighbours * (hosts if HOST in axes else 1)
    crosses = n > neighbours
    if op == "all-to-all":
        host = gpus * (n - neighbours) / n * payload
        inside = (neighbours - 1) / n * payload
        return LinkLoad(
            transfer, (n - 1) / n * payload, host, inside, times if crosses else 0
        )
    passes = 2 if op == "all-reduce" else 1
    sent = passes * (n - 1) / n * payload
    # A ring over all GPUs leaves a host once; one over hosts alone from each GPU.
    host = sent * gpus / neighbours if crosses else 0.0
    inside = sent if neighbours > 1 else 0.0
    rounds = times * passes * math.ceil(math.log2(n)) if crosses else 0
    return LinkLoad(transfer, sent, host, inside, rounds)
