"""The planner's model beside what `benchmarks.network` measured.

    python -m benchmarks.network.plan docs/network.json --page docs/plan.md

prints a Markdown table, and puts it between the marks of a page. What goes in is the
link's rate, less the headers of its packets, and one measured number, a computation:
for a training step that of Adam's step on as many hosts, as a user of the planner would
measure it, and once more the step's own; for an exchange by itself its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from benchmarks.network.hosts import bits_per_second
from benchmarks.network.report import MARK
from benchmarks.page import fill
from models import SIZES
from train.bert.objective import abstract_params
from train.plan.wire import Cluster, Phase, exact, flat, hierarchical, powers

PAYLOAD = 1448 / 1514
"""Share of an Ethernet frame on the wire that is TCP's payload."""
LATENCY = 100e-6
"""Seconds of a message through the bridge between two hosts."""
INSIDE_RATE = float("inf")
"""What devices of a host exchange counts as computation in the testbed."""


@dataclass(frozen=True)
class Compared:
    """A row of the testbed, and what the planner says of it.

    Attributes:
      row: As it was written.
      host_bytes: That leave a host.
      seconds: Of the whole, a step's with the computation of Adam's.
      own_seconds: With the row's own computation.
    """

    row: dict[str, Any]
    host_bytes: float
    seconds: float
    own_seconds: float


def phases_of(
    row: dict[str, Any], settings: dict[str, Any], cluster: Cluster
) -> tuple[Phase, ...]:
    """The collectives of a row.

    Args:
      row: Of the testbed.
      settings: Its flags.
      cluster: Its hosts.

    Returns:
      What the planner takes them for.
    """
    several = cluster.hosts > 1 and cluster.gpus > 1
    form = hierarchical if several and ", flat" not in row["name"] else flat
    if row["kind"] == "exchange":
        sizes = (int(settings["size"]),)
        if row["name"] == "pmean":
            return exact(sizes, 4, cluster)
        wire = "counts" if "count_mean" in row["name"] else "signs"
        return form(sizes, wire, cluster)
    leaves = jax.tree.leaves(abstract_params(SIZES[settings["model"]]))
    sizes = tuple(leaf.size for leaf in leaves)
    # The measurement is from before the power of rows and columns.
    if row["stage"] == "compressed":
        wire = "counts" if "counts" in row["name"] else "signs"
        return (*form(sizes, wire, cluster), powers(sizes, 0, cluster))
    if row["stage"] == "warmup":
        return (*exact(sizes, 4, cluster), powers(sizes, 0, cluster))
    return exact(sizes, 4, cluster)


def compare(measured: dict[str, Any]) -> list[Compared]:
    """Predicts every row of a measurement.

    Args:
      measured: What `benchmarks.network` wrote.

    Returns:
      The rows, in their order.
    """
    settings, rows = measured["settings"], measured["rows"]
    adams = {
        _where(row): row["computation_seconds"] for row in rows if row["name"] == "adam"
    }
    found = []
    for row in rows:
        rate = bits_per_second(row["rate"]) / 8 * PAYLOAD
        at = Cluster(row["hosts"], row["devices"], rate, INSIDE_RATE, LATENCY)
        phases = phases_of(row, settings, at)
        wire = sum(phase.seconds(at) for phase in phases)
        own = given = row["computation_seconds"]
        if row["kind"] == "step":
            given = adams.get(_where(row), own)
        sent = sum(phase.host_bytes for phase in phases)
        found.append(Compared(row, sent, given + wire, own + wire))
    return found


def _where(row: dict[str, Any]) -> tuple[int, int, str]:
    return row["hosts"], row["devices"], row["rate"]


def table(compared: list[Compared]) -> str:
    """A line a row, as Markdown."""
    lines = [
        "| hosts | rate | | stage | MB a host, compiled | predicted | seconds, "
        "measured | predicted | ratio | with its own computation |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for found in compared:
        row = found.row
        cells = (
            str(row["hosts"])
            if row["devices"] == 1
            else f"{row['hosts']} of {row['devices']} devices",
            row["rate"],
            row["name"],
            row["stage"] or "",
            f"{row['sent_bytes'] / 1e6:.2f}",
            f"{found.host_bytes / 1e6:.2f}",
            f"{row['median']:.3f}",
            f"{found.seconds:.3f}",
            f"{found.seconds / row['median']:.2f}",
            f"{found.own_seconds / row['median']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(file: Annotated[Path, tyro.conf.Positional], page: Path | None = None) -> None:
    """Compares a measurement.

    Args:
      file: What `python -m benchmarks.network --json FILE` wrote.
      page: Where the table goes, between its marks.
    """
    text = table(compare(json.loads(file.read_text("utf-8"))))
    print(text)
    if page is not None:
        page.write_text(fill(page.read_text("utf-8"), MARK, text), "utf-8")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmarks.network.plan")
