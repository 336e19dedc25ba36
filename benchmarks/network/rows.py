"""What `benchmarks.network` measures, and what follows from it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.network.hosts import bits_per_second

if TYPE_CHECKING:
    from collections.abc import Sequence

BASELINES = {"step": "adam", "exchange": "pmean"}
"""What others are compared with, from the kind of row."""


@dataclass(frozen=True)
class Row:
    """One case on so many hosts at one rate.

    Attributes:
      hosts: how many.
      devices: of each.
      rate: of their links.
      kind: 'step' or 'exchange'.
      name: the optimizer or the exchange.
      stage: 'warmup', 'compressed', or None where there is but one.
      seconds: of each repeat.
      unlimited_seconds: median on links without a limit.
      computation_seconds: what of these the collectives between hosts do not take.
      sent_bytes: that leave a host each time, counted from the compiled program.
      tx_bytes: that left the interface of the host that sent most, each time.
      packet_bytes: the same with the headers of each packet.
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
    def case(self) -> tuple[object, ...]:
        """What was measured, and where."""
        return self.where, self.name, self.stage

    @property
    def where(self) -> tuple[object, ...]:
        """What a row has in common with its baseline."""
        return self.hosts, self.devices, self.rate, self.kind

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third, in seconds."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    @property
    def wire_seconds(self) -> float:
        """What the counted bytes take at the link's rate."""
        return 8 * self.sent_bytes / bits_per_second(self.rate)

    @property
    def bound_seconds(self) -> float:
        """Computation, then the wire."""
        return self.computation_seconds + self.wire_seconds

    @property
    def attained(self) -> float:
        """Share of the bound."""
        return self.bound_seconds / self.median

    @property
    def network_share(self) -> float:
        """Share of the time that is not computation."""
        return 1 - self.computation_seconds / self.median

    @property
    def overhead(self) -> float:
        """Bytes that left the interface, to those counted."""
        return self.tx_bytes / self.sent_bytes if self.sent_bytes else float("nan")

    @property
    def packet_overhead(self) -> float:
        """The same with the headers of each packet."""
        return self.packet_bytes / self.sent_bytes if self.sent_bytes else float("nan")


@dataclass
class Results:
    """What was measured, and where.

    Attributes:
      settings: the flags.
      network: how hosts and links are set up.
      processor: name of the CPU.
      jax: version.
      rows: the measurements.
    """

    settings: dict[str, Any]
    network: dict[str, Any]
    processor: str
    jax: str
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Adds a row, or puts it in the place of an earlier one of the same case."""
        cases = [other.case for other in self.rows]
        if row.case in cases:
            self.rows[cases.index(row.case)] = row
            return
        self.rows.append(row)
        self.rows.sort(key=lambda r: (r.hosts, r.devices, bits_per_second(r.rate)))


def speed_up(
    row: Row, rows: Sequence[Row], *, equal_computation: bool = False
) -> float | None:
    """How much faster a row is than its baseline on as many hosts at the same rate.

    Args:
      row: Which.
      rows: Among which the baseline is.
      equal_computation: Whether the baseline counts as computing no longer than the
        row does.

    Returns:
      The ratio of the medians; None where the baseline was not measured.
    """
    for other in rows:
        if other.where == row.where and other.name == BASELINES[row.kind]:
            excess = max(0.0, other.computation_seconds - row.computation_seconds)
            return (other.median - equal_computation * excess) / row.median
    return None
