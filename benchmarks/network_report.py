"""The table, the JSON and the picture of `benchmarks.network`."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.network_hosts import bits_per_second

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

BASELINES = {"step": "adam", "exchange": "pmean"}
"""What others are compared with, from the kind of row."""


@dataclass(frozen=True)
class Row:
    """One case on so many hosts at one rate.

    Attributes:
      hosts: how many.
      rate: of their links.
      kind: 'step' or 'exchange'.
      name: the optimizer or the exchange.
      stage: 'warmup', 'compressed', or None where there is but one.
      seconds: of each repeat.
      unlimited_seconds: median on links without a limit.
      computation_seconds: what of these the collectives alone do not take.
      sent_bytes: that leave a host each time, counted from the compiled program.
      tx_bytes: that left the interface of the host that sent most, each time.
      packet_bytes: the same with the headers of each packet.
    """

    hosts: int
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
      rows: the measurements.
    """

    settings: dict[str, Any]
    network: dict[str, Any]
    processor: str
    rows: list[Row] = field(default_factory=list)


def speed_up(row: Row, rows: Sequence[Row]) -> float | None:
    """How much faster a row is than its baseline on as many hosts at the same rate.

    Args:
      row: Which.
      rows: Among which the baseline is.

    Returns:
      The ratio of the medians; None where the baseline was not measured.
    """
    for other in rows:
        same = (other.hosts, other.rate, other.kind) == (row.hosts, row.rate, row.kind)
        if same and other.name == BASELINES[row.kind]:
            return other.median / row.median
    return None


def table(results: Results) -> str:
    """Two tables as Markdown: training steps, and exchanges by themselves.

    Args:
      results: Of the measurement.

    Returns:
      The lines.
    """
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
            "computation",
            "wire",
            "of the bound",
            "on the network",
            "MB counted",
            "sent / counted",
            "with headers",
        ]
        lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [_line(row, results.rows, len(names)) for row in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(row: Row, rows: Sequence[Row], names: int) -> str:
    ratio = speed_up(row, rows)
    first, third = row.quartiles
    cells = (
        str(row.hosts),
        row.rate,
        *(row.name, row.stage or "")[:names],
        f"{row.median:.3f} ({first:.3f}, {third:.3f})",
        "" if ratio is None else f"{ratio:.1f}",
        f"{row.computation_seconds:.3f}",
        f"{row.wire_seconds:.3f}",
        f"{row.attained:.2f}",
        f"{row.network_share:.0%}",
        f"{row.sent_bytes / 1e6:.2f}",
        f"{row.overhead:.3f}",
        f"{row.packet_overhead:.3f}",
    )
    return f"| {' | '.join(cells)} |"


def write_json(file: Path, results: Results) -> None:
    """Writes everything that was measured, and what follows from it.

    Args:
      file: Where to.
      results: Of the measurement.
    """
    stored = dataclasses.asdict(results)
    for held, row in zip(stored["rows"], results.rows, strict=True):
        held |= {
            "median": row.median,
            "quartiles": row.quartiles,
            "wire_seconds": row.wire_seconds,
            "bound_seconds": row.bound_seconds,
            "attained": row.attained,
            "network_share": row.network_share,
            "speed_up": speed_up(row, results.rows),
        }
    text = json.dumps(stored, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def write_picture(file: Path, results: Results) -> None:
    """Draws how much faster than its baseline everything is, a panel a host count.

    Args:
      file: Where to, a PNG.
      results: Of the measurement.
    """
    mpl.use("Agg")
    hosts = sorted({row.hosts for row in results.rows})
    kinds = [kind for kind in BASELINES if any(r.kind == kind for r in results.rows)]
    figure, grid = plt.subplots(
        len(kinds),
        len(hosts),
        figsize=(4.5 * len(hosts) + 1, 3.5 * len(kinds) + 0.5),
        squeeze=False,
        layout="constrained",
    )
    for line, kind in zip(grid, kinds, strict=True):
        for axes, count in zip(line, hosts, strict=True):
            rows = [r for r in results.rows if (r.kind, r.hosts) == (kind, count)]
            _bars(axes, rows)
            axes.set(title=f"{kind}, {count} hosts", xscale="log", xlabel="seconds")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    labels = [f"{row.name} {row.stage or ''}\n{row.rate}" for row in rows]
    places = range(len(rows))
    axes.barh(places, [row.median for row in rows], color="C0", label="measured")
    axes.plot(
        [row.bound_seconds for row in rows],
        places,
        linestyle="",
        marker="|",
        markersize=14,
        color="black",
        label="bound",
    )
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    for place, row in zip(places, rows, strict=True):
        ratio = speed_up(row, rows)
        if ratio is not None:
            axes.annotate(f" {ratio:.1f} to 1", (row.median, place), va="center")
    axes.legend(fontsize=7)
