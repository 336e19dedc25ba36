"""Times workloads on hosts, at every rate of their links."""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.network import hosts as network_hosts
from benchmarks.network.config import AUTO, listed, workloads
from benchmarks.network.results import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.network.config import Config
    from benchmarks.network.hosts import Host
    from benchmarks.network.processes import Processes

ADAMS_SHARE = 0.95
"""The network's share of Adam's step at the rate `auto`."""
FEWEST_REPEATS = 3


def auto_rate(sent_bytes: int, computation: float) -> str:
    """The rate at which the network takes `ADAMS_SHARE` of a step, in whole Mbit/s.

    Args:
      sent_bytes: Bytes that a host sends in a step.
      computation: Seconds that a step computes.

    Example:
      >>> auto_rate(50_000_000, 0.2)
      '105mbit'
    """
    seconds = computation * ADAMS_SHARE / (1 - ADAMS_SHARE)
    return f"{max(1.0, 8 * sent_bytes / seconds // 1e6):.0f}mbit"


def _seconds(
    config: Config, processes: Processes, call: str, expected: float
) -> list[float]:
    """Seconds of each repeat of a call, those of the slowest host."""
    repeats = int(config.longest / max(expected, 1e-9))
    repeats = min(config.repeats, max(FEWEST_REPEATS, repeats))
    replies = processes.ask(
        {"measure": call, "repeats": repeats},
        config.timeout + 4 * repeats * expected,
    )
    slowest = zip(*(reply["seconds"] for reply in replies), strict=True)
    return [max(seconds) for seconds in slowest]


def measure(
    config: Config, hosts: tuple[Host, ...], processes: Processes
) -> Iterator[Measurement]:
    """Measures every workload on the same hosts at every rate."""
    rates = listed(config.rates)
    seconds_of = functools.partial(_seconds, config, processes)
    for workload in workloads(config):  # Adam's step, if any, is the first.
        network_hosts.limit(hosts, network_hosts.UNLIMITED)
        request = {"prepare": workload.prepare, "arguments": workload.arguments}
        replies = processes.ask(request, config.timeout)
        sent_bytes = max(reply["sent_bytes"] for reply in replies)
        for place, rate in enumerate(rates):
            network_hosts.limit(hosts, network_hosts.UNLIMITED)
            whole = statistics.median(seconds_of("call", 0.0))
            alone = statistics.median(seconds_of("alone", 0.0))
            computation = max(0.0, whole - alone)
            if rate == AUTO:
                rate = rates[place] = auto_rate(sent_bytes, computation)
            network_hosts.limit(hosts, rate)
            wire = 8 * sent_bytes / network_hosts.bits_per_second(rate)
            before = network_hosts.sent(hosts)
            seconds = seconds_of("call", computation + wire)
            after = network_hosts.sent(hosts)
            left = np.subtract(after, before).max(axis=0) / (len(seconds) + 1)
            yield Measurement(
                hosts=len(hosts),
                devices=config.devices,
                rate=rate,
                kind=workload.kind,
                name=workload.name,
                stage=workload.stage,
                seconds=seconds,
                unlimited_seconds=whole,
                computation_seconds=computation,
                sent_bytes=sent_bytes,
                tx_bytes=float(left[0]),
                packet_bytes=float(left[1]),
                rounds=replies[0]["rounds"],
            )
