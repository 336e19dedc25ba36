"""The measurements of `benchmarks.network`, what follows from them, and their table."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.network.hosts import bits_per_second
from benchmarks.page import table
from train.core.text_file import replace_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BASELINES = {"step": "adam", "exchange": "pmean"}
"""The workload that others are compared with, by kind."""
MARK = "measured"
"""The part of a page that the tables go to."""


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
      rounds: Messages between hosts that wait for one another, each time, as the
        planner counts them; None in files of before they were counted.
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
    rounds: float | None = None

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
        return self.tx_bytes / self.sent_bytes

    @property
    def packet_overhead(self) -> float:
        """Bytes of packets with their headers for each byte counted."""
        return self.packet_bytes / self.sent_bytes


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

        def workload(row: Measurement) -> tuple[object, ...]:
            return row.where, row.name, row.stage

        workloads = [workload(row) for row in self.rows]
        if workload(measurement) in workloads:
            self.rows[workloads.index(workload(measurement))] = measurement
            return
        self.rows.append(measurement)
        self.rows.sort(key=lambda r: (r.hosts, r.devices, bits_per_second(r.rate)))

    def write(self, file: Path) -> None:
        """Writes all measurements, and the numbers that follow from them, as JSON."""
        stored = dataclasses.asdict(self)
        for written, row in zip(stored["rows"], self.rows, strict=True):
            written |= {
                "median": row.median,
                "quartiles": row.quartiles,
                "wire_seconds": row.wire_seconds,
                "bound_seconds": row.bound_seconds,
                "attained": row.attained,
                "network_share": row.network_share,
                "speed_up": speed_up(row, self.rows),
            }
        replace_text(file, json.dumps(stored, indent=1, ensure_ascii=False) + "\n")

    def go_on(self, file: Path) -> None:
        """Takes the rows of an earlier run over.

        Raises:
          SystemExit: They are of other settings or of another machine.
        """
        earlier = read_results(file)
        for name in ("settings", "network", "processor", "jax"):
            old, new = getattr(earlier, name), getattr(self, name)
            if old != new:
                raise SystemExit(
                    f"{file} has rows with {name} {old}, not {new}: remove it, or "
                    "choose another --json."
                )
        self.rows += earlier.rows


def read_results(file: Path) -> Results:
    """Reads what `Results.write` wrote."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    names = [each.name for each in dataclasses.fields(Measurement)]
    rows = [
        Measurement(**{n: row[n] for n in names if n in row}) for row in stored["rows"]
    ]
    return Results(**(stored | {"rows": rows}))


def tables(results: Results) -> str:
    """Two tables as Markdown: training steps, and exchanges by themselves."""
    parts = []
    heads = {"step": ["optimizer", "stage"], "exchange": ["exchange"]}
    for kind, names in heads.items():
        rows = [row for row in results.rows if row.kind == kind]
        if not rows:
            continue
        columns = [
            "hosts",
            "rate",
            *names,
            "seconds (quartiles)",
            f"faster than {BASELINES[kind]}",
            *(["with equal computation"] if kind == "step" else []),
            "computation",
            "wire",
            "of the bound",
            "on the network",
            "MB counted",
            "sent / counted",
            "with headers",
        ]
        lines = [_cells(row, results.rows, len(names)) for row in rows]
        parts.append(table(columns, lines))
    return "\n\n".join(parts)


def _cells(
    row: Measurement, rows: Sequence[Measurement], names: int
) -> tuple[str, ...]:
    # Exchanges by themselves: pmean computes nothing of its own.
    forms = (False, True) if row.kind == "step" else (False,)
    ratios = [speed_up(row, rows, equal_computation=form) for form in forms]
    first, third = row.quartiles
    # A step of a worker's own sends nothing.
    overheads = (row.overhead, row.packet_overhead) if row.sent_bytes else ()
    return (
        str(row.hosts) if row.devices == 1 else f"{row.hosts} of {row.devices} devices",
        row.rate,
        *(row.name, row.stage or "")[:names],
        f"{row.median:.3f} ({first:.3f}, {third:.3f})",
        *("" if ratio is None else f"{ratio:.1f}" for ratio in ratios),
        f"{row.computation_seconds:.3f}",
        f"{row.wire_seconds:.3f}",
        f"{row.attained:.2f}",
        f"{row.network_share:.0%}",
        f"{row.sent_bytes / 1e6:.2f}",
        *([f"{each:.3f}" for each in overheads] or ["", ""]),
    )
