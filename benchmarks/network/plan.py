"""The planner's model beside what `benchmarks.network` measured.

    python -m benchmarks.network.plan docs/network.json --page docs/notes/planner.md

prints a Markdown table, and puts it between the marks of a page. It is given the
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
import jax.numpy as jnp
import tyro

from benchmarks.network.hosts import bits_per_second
from benchmarks.network.report import MARK
from benchmarks.page import fill, table
from models import SIZES
from train.bert.objective import abstract_params
from train.core.exchange import EXCHANGES
from train.plan.cluster import GpuCluster
from train.plan.transfers import Transfer, exchange_transfers, loss_transfer

PAYLOAD = 1448 / 1514
"""Share of an Ethernet frame on the wire that is TCP's payload."""
LATENCY = 100e-6
"""Seconds of a message through the bridge between two hosts."""
INSIDE_RATE = float("inf")
"""The exchange between devices of a host counts as computation in the testbed."""


HEADS = (
    "hosts",
    "rate",
    "",
    "stage",
    "MB a host, compiled",
    "predicted",
    "seconds, measured",
    "predicted",
    "ratio",
    "with its own computation",
)


@dataclass(frozen=True)
class Compared:
    """A row of the testbed beside the planner's numbers.

    Attributes:
      row: As it was written.
      host_bytes: Bytes that leave a host.
      seconds: Seconds of the whole, a step's with the computation of Adam's.
      seconds_with_computation: Seconds with the computation of the row itself.
    """

    row: dict[str, Any]
    host_bytes: float
    seconds: float
    seconds_with_computation: float


def leaves_by_kind(
    settings: dict[str, Any],
) -> dict[str, list[jax.ShapeDtypeStruct]]:
    """The leaves that are exchanged, by the kind of the row.

    Args:
      settings: The testbed's flags.

    Returns:
      The model's of a step, one of an exchange by itself.
    """
    params = abstract_params(SIZES[settings["model"]])
    sizes = {
        # Flat: which leaves have rows and columns matters to the growth alone.
        "step": [leaf.size for leaf in jax.tree.leaves(params)],
        "exchange": [int(settings["size"])],
    }
    return {
        kind: [jax.ShapeDtypeStruct((size,), jnp.float32) for size in each]
        for kind, each in sizes.items()
    }


def transfers_of(
    row: dict[str, Any], leaves: list[jax.ShapeDtypeStruct], cluster: GpuCluster
) -> tuple[Transfer, ...]:
    """The collectives of a row, by the planner.

    Args:
      row: A measurement of the testbed.
      leaves: The leaves that it exchanges.
      cluster: Its hosts.

    Returns:
      The collectives.
    """
    exchange = "exact_mean"
    if row["stage"] == "compressed" or row["name"].startswith(tuple(EXCHANGES)):
        exchange = "count_mean" if "count_mean" in row["name"] else "sign_mean"
    several = cluster.hosts > 1 and cluster.gpus > 1
    hierarchical = several and exchange != "exact_mean" and ", flat" not in row["name"]
    transfers = exchange_transfers(
        exchange, leaves, cluster.axis_sizes, hierarchical=hierarchical
    )
    if row["kind"] == "exchange":
        return transfers
    # The steps that are measured are not those that measure the growth.
    return (*transfers, loss_transfer(cluster.axis_sizes))


def compare(measured: dict[str, Any]) -> list[Compared]:
    """Predicts every row of a measurement.

    Args:
      measured: The JSON of `benchmarks.network`.

    Returns:
      The rows, in their order.
    """
    leaves, rows = leaves_by_kind(measured["settings"]), measured["rows"]
    adams = {
        _where(row): row["computation_seconds"] for row in rows if row["name"] == "adam"
    }
    compared = []
    for row in rows:
        rate = bits_per_second(row["rate"]) / 8 * PAYLOAD
        hosts = GpuCluster(row["hosts"], row["devices"], rate, INSIDE_RATE, LATENCY)
        loads = hosts.loads(transfers_of(row, leaves[row["kind"]], hosts))
        wire = sum(map(hosts.seconds, loads))
        computation = given = row["computation_seconds"]
        if row["kind"] == "step":
            given = adams.get(_where(row), computation)
        leaving = sum(load.host_bytes for load in loads)
        compared.append(Compared(row, leaving, given + wire, computation + wire))
    return compared


def _where(row: dict[str, Any]) -> tuple[int, int, str]:
    return row["hosts"], row["devices"], row["rate"]


def text(compared: list[Compared]) -> str:
    """The comparison as a Markdown table."""
    return table(HEADS, map(_cells, compared))


def _cells(each: Compared) -> tuple[str, ...]:
    row = each.row
    return (
        str(row["hosts"])
        if row["devices"] == 1
        else f"{row['hosts']} of {row['devices']} devices",
        row["rate"],
        row["name"],
        row["stage"] or "",
        f"{row['sent_bytes'] / 1e6:.2f}",
        f"{each.host_bytes / 1e6:.2f}",
        f"{row['median']:.3f}",
        f"{each.seconds:.3f}",
        f"{each.seconds / row['median']:.2f}",
        f"{each.seconds_with_computation / row['median']:.2f}",
    )


def main(file: Annotated[Path, tyro.conf.Positional], page: Path | None = None) -> None:
    """Compares a measurement.

    Args:
      file: The JSON that `python -m benchmarks.network --json FILE` wrote.
      page: The page whose marks the table goes between.
    """
    lines = text(compare(json.loads(file.read_text("utf-8"))))
    print(lines)
    if page is not None:
        page.write_text(fill(page.read_text("utf-8"), MARK, lines), "utf-8")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmarks.network.plan")
