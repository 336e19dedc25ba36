"""1-bit Adam on slow networks: training steps on hosts with limited links.

    python -m benchmarks.network --hosts 2,4 --rates 100mbit,1gbit --json network.json

The hosts are network namespaces of this machine, with TCP between them and a token
bucket of the given rate on what each sends; it must be run as root. On each runs one
process, and together they take real training steps (forward, backward, clipping, the
optimizer, in place) of a BERT on random tokens, and exchanges of a flat buffer by
themselves. Of each, in every stage and at every rate, it reports

- seconds a time: for each repeat that of the slowest host, then the quartiles;
- bytes that left the host that sent most: `tx_bytes` of its interface, and what the
  token bucket let through, which counts the headers of each packet;
- bytes counted from the compiled program;
- seconds of computation: on links without a limit, the time of the whole less that of
  its collectives between hosts alone (the same operations on buffers of the same
  sizes, in the same processes). All hosts compute at the same time on the machine's
  few cores, here as at every rate, so contention is the same in both, and what TCP
  costs the cores is not called computation. What devices of one host exchange is;
- the bound: computation, then the counted bytes at the link's rate, nothing at the
  same time and no headers; and the share of it that is attained;
- the share of the time that is not computation, and the speed-up over Adam, or over
  `pmean`.

A rate may be `auto`: that at which Adam would spend 95 % of its step on the network.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from benchmarks.machine import processor
from benchmarks.network import hosts as network_hosts
from benchmarks.network import processes as network_processes
from benchmarks.network.config import host_counts
from benchmarks.network.measure import measure
from benchmarks.network.results import MARK, Results, tables
from benchmarks.page import fill

if TYPE_CHECKING:
    from types import FrameType

    from benchmarks.network.config import Config
    from benchmarks.network.hosts import Host

PORT = 29500
SETTINGS = "model", "batch", "seq", "size"
"""Flags that all measurements of a JSON have in common."""
ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def main(config: Config) -> None:
    """Measures, prints tables and writes the files that are asked for."""
    for number in ENDING:
        signal.signal(number, _end)
    why = network_hosts.missing()
    if why:
        raise SystemExit(why)
    for name in network_hosts.remove_leftovers():
        print(f"removed {name} of a run that was killed", file=sys.stderr)
    if config.clean:
        return
    counts = host_counts(config)
    results = Results(
        settings={name: getattr(config, name) for name in SETTINGS},
        network=network_hosts.described(),
        processor=processor(),
        jax=metadata.version("jax"),
    )
    if config.json and config.json.exists():
        results.go_on(config.json)
    if config.page:  # Its faults are said before anything is measured.
        fill(config.page.read_text("utf-8"), MARK, "")
    for count in counts:
        with (
            tempfile.TemporaryDirectory() as folder,
            network_hosts.joined(count) as hosts,
            network_processes.started(
                hosts, _worker(config, hosts), Path(folder)
            ) as processes,
        ):
            measured = measure(config, hosts, processes)
            for measurement in tqdm(measured, desc=f"{count} hosts", disable=None):
                results.add(measurement)
                if config.json:
                    results.write(config.json)
    print(tables(results))
    if config.page:
        page = config.page.read_text("utf-8")
        config.page.write_text(fill(page, MARK, tables(results)), "utf-8")


def _worker(config: Config, hosts: tuple[Host, ...]) -> list[str]:
    settings = {
        "coordinator": f"{hosts[0].address}:{PORT}",
        "hosts": len(hosts),
        "devices": config.devices,
        "model": config.model,
        "batch": config.batch,
        "seq": config.seq,
        "size": int(config.size),
    }
    return ["-m", "benchmarks.network.worker", json.dumps(settings)]


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    # So that everything is taken down, and a second signal does not keep it from it.
    raise SystemExit(128 + number)
