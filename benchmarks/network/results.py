"""The measurements of `benchmarks.network`, and the numbers that follow from them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.network.hosts import bits_per_second

if TYPE_CHECKING:
    from collections.abc import Sequence

BASELINES = {"step": "adam", "exchange": "pmean"}
"""The workload that others are compared with, by kind."""


@dataclass(frozen=True)
class Measurement:
    """One workload on so many hosts at one rate.

    Attributes:
      hosts: Hosts.
      devices: Devices of each.
      rate: Rate of their links.
      kind: 'step' or 'exchange'.
      name: The optimizer or the exchange.
      stage: 'warmup', 'compressed', or None where there is but one.
      seconds: Seconds of each repeat.
      unlimited_seconds: Their median on links without a limit.
      computation_seconds: The part of these that the collectives between hosts do not
        take.
      sent_bytes: Bytes that leave a host each time, counted from the compiled program.
      tx_bytes: Bytes that left the interface of the host that sent most, each time.
      packet_bytes: The same with the headers of each packet.
    """

    hosts: int
    devices: int
    rate: str
    kind: str
    name: str
    stage: str | None
    seconds: list[float]
    unlimited_seconds: float
    computation_seconds: float
    sent_bytes: int
    tx_bytes: float
    packet_bytes: float

    @property
    def workload(self) -> tuple[object, ...]:
        """The key of what was measured, and where."""
        return self.where, self.name, self.stage

    @property
    def where(self) -> tuple[object, ...]:
        """The key that it has in common with its baseline."""
        return self.hosts, self.devices, self.rate, self.kind

    @property
    def median(self) -> float:
        """Median seconds of a repeat."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of the seconds."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    @property
    def wire_seconds(self) -> float:
        """Seconds of the counted bytes at the link's rate."""
        return 8 * self.sent_bytes / bits_per_second(self.rate)

    @property
    def bound_seconds(self) -> float:
        """Seconds of computation, then of the wire."""
        return self.computation_seconds + self.wire_seconds

    @property
    def attained(self) -> float:
        """The bound's seconds as a share of the median's."""
        return self.bound_seconds / self.median

    @property
    def network_share(self) -> float:
        """Share of the time that is not computation."""
        return 1 - self.computation_seconds / self.median

    @property
    def overhead(self) -> float:
        """Bytes that left the interface for each byte counted."""
        return self.tx_bytes / self.sent_bytes if self.sent_bytes else float("nan")

    @property
    def packet_overhead(self) -> float:
        """Bytes of packets with their headers for each byte counted."""
        return self.packet_bytes / self.sent_bytes if self.sent_bytes else float("nan")


@dataclass
class Results:
    """All that was measured, and on which machine.

    Attributes:
      settings: The flags.
      network: The settings of hosts and links.
      processor: Name of the CPU.
      jax: Version.
      rows: The measurements.
    """

    settings: dict[str, Any]
    network: dict[str, Any]
    processor: str
    jax: str
    rows: list[Measurement] = field(default_factory=list)

    def add(self, measurement: Measurement) -> None:
        """Adds a measurement, in the place of an earlier one of the same workload."""
        workloads = [other.workload for other in self.rows]
        if measurement.workload in workloads:
            self.rows[workloads.index(measurement.workload)] = measurement
            return
        self.rows.append(measurement)
        self.rows.sort(key=lambda r: (r.hosts, r.devices, bits_per_second(r.rate)))


def speed_up(
    measurement: Measurement,
    others: Sequence[Measurement],
    *,
    equal_computation: bool = False,
) -> float | None:
    """The speed-up over the baseline on as many hosts at the same rate.

    Args:
      measurement: The faster one.
      others: All, the baseline among them.
      equal_computation: Whether the baseline counts as computing no longer.

    Returns:
      The ratio of the medians; None where the baseline was not measured.
    """
    name, where = BASELINES[measurement.kind], measurement.where
    for other in others:
        if other.where == where and other.name == name:
            excess = other.computation_seconds - measurement.computation_seconds
            saved = max(0.0, excess) if equal_computation else 0.0
            return (other.median - saved) / measurement.median
    return None
