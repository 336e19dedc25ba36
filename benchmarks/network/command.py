"""What 1-bit Adam gains on slow networks: training steps on hosts with limited links.

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
import statistics
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tqdm import tqdm

from benchmarks.network import hosts as network_hosts
from benchmarks.network import processes as network_processes
from benchmarks.network.report import (
    MARK,
    read_rows,
    tables,
    write_json,
    write_picture,
)
from benchmarks.network.rows import BASELINES, Results, Row
from benchmarks.page import fill

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from benchmarks.network.hosts import Host
    from benchmarks.network.processes import Processes

PORT = 29500
AUTO = "auto"
ADAMS_SHARE = 0.95
"""Of Adam's step that the network takes at the rate `auto`."""
FEWEST_REPEATS = 3
SETTINGS = "model", "batch", "seq", "size"
"""What all rows of a JSON have in common."""
OPTIMIZERS = "adam", "onebit_adam"
EXCHANGES = "pmean", "sign_mean", "count_mean"
WIRES = "signs", "counts"
ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@dataclass(frozen=True)
class Config:
    """What is measured. Lists are separated by commas."""

    hosts: str = "2,4"
    """Numbers of hosts."""
    rates: str = "100mbit,1gbit"
    """Of each host's link, such as 100mbit, 2.5gbit, unlimited or auto."""
    optimizers: str = "adam,onebit_adam"
    """Whose training steps are taken."""
    exchanges: str = "pmean,sign_mean"
    """Exchanges by themselves: of pmean, sign_mean and count_mean."""
    wires: str = "signs"
    """What 1-bit Adam sends: of signs and counts."""
    exchange_only: bool = False
    """Take no training steps."""
    model: Literal["tiny", "mini", "small", "medium", "base", "large"] = "mini"
    """Size of the BERT."""
    batch: int = 1
    """Sequences a device."""
    seq: int = 16
    """Tokens a sequence."""
    size: float = 1.1e7
    """Values of an exchange by itself."""
    devices: int = 1
    """Virtual devices a host."""
    topology: Literal["auto", "flat", "hierarchical"] = "auto"
    """Of 1-bit exchanges; auto is hierarchical where hosts have several devices."""
    repeats: int = 11
    """Measured times, of which the median counts."""
    longest: float = 30
    """Seconds that the repeats of a row may take; three are made in any case."""
    timeout: float = 600
    """Seconds that a process may take to compile, or longer than expected to measure,
    before the run is given up."""
    json: Path | None = None
    """Where the results go, beside those of other hosts, devices and rates that it
    holds already."""
    page: Path | None = None
    """Markdown, whose tables between its two marks are written anew."""
    picture: Path | None = None
    """Where the picture goes, a PNG."""
    clean: bool = False
    """Only take down what runs that were killed have left."""


def listed(text: str) -> list[str]:
    """The parts of a list that is separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def cases(config: Config) -> list[tuple[str, str | None, dict[str, Any]]]:
    """Name, stage and request of everything that is measured, baselines first.

    Args:
      config: The flags.

    Returns:
      The cases.

    Raises:
      SystemExit: If something named is not known.
    """
    wires = _known(config.wires, "--wires", WIRES)
    optimizers = _known(config.optimizers, "--optimizers", OPTIMIZERS)
    exchanges = _known(config.exchanges, "--exchanges", EXCHANGES)
    flat = ", flat" if config.devices > 1 and config.topology == "flat" else ""
    steps = []
    for optimizer in [] if config.exchange_only else optimizers:
        if optimizer == "adam":
            steps.append(("adam", None, optimizer, "signs"))
            continue
        steps.append((optimizer, "warmup", optimizer, "signs"))
        for wire in wires:
            name = optimizer + ("" if wire == "signs" else f", {wire}") + flat
            steps.append((name, "compressed", optimizer, wire))
    found: list[tuple[str, str | None, dict[str, Any]]] = []
    for name, stage, optimizer, wire in steps:
        exchange = {"signs": "sign_mean", "counts": "count_mean"}[wire]
        of = {"optimizer": optimizer, "exchange": exchange, "stage": stage}
        found.append((name, stage, {"prepare": "step", "of": of}))
    for exchange in exchanges:
        name = exchange + ("" if exchange == "pmean" else flat)
        found.append((name, None, {"prepare": "exchange", "of": {"name": exchange}}))
    return sorted(found, key=lambda case: case[0] not in BASELINES.values())


def _known(text: str, flag: str, known: tuple[str, ...]) -> list[str]:
    names = listed(text)
    for name in names:
        if name not in known:
            raise SystemExit(f"{flag} takes {', '.join(known)}, not {name!r}.")
    return names


def checked(config: Config) -> list[int]:
    """Refuses what cannot be measured.

    Args:
      config: The flags.

    Returns:
      The numbers of hosts.

    Raises:
      SystemExit: With what is wrong.
    """
    names = [name for name, _, _ in cases(config)]
    for rate in listed(config.rates):
        if rate == AUTO and "adam" not in names:
            raise SystemExit("--rates auto is found from Adam's step: measure it too.")
        if rate != AUTO:
            try:
                network_hosts.bits_per_second(rate)
            except ValueError as error:
                raise SystemExit(f"--rates: {error}.") from None
    numbers = config.devices, config.batch, config.seq, config.repeats, config.size
    if not all(number >= 1 for number in numbers):  # NaN is not
        raise SystemExit(
            "--devices, --batch, --seq, --repeats and --size must be at least 1."
        )
    if not (config.longest > 0 and config.timeout > 0):
        raise SystemExit("--longest and --timeout must be positive numbers of seconds.")
    for flag, file in (("--json", config.json), ("--picture", config.picture)):
        if file and not file.parent.is_dir():
            raise SystemExit(f"{flag} {file}: there is no folder {file.parent}.")
    if config.page and not config.page.is_file():
        raise SystemExit(f"--page {config.page}: there is no such file.")
    counts = listed(config.hosts)
    if not all(count.isdecimal() and int(count) > 1 for count in counts):
        raise SystemExit(f"--hosts takes numbers from 2 on, not {config.hosts!r}.")
    return [int(count) for count in counts]


def auto_rate(sent_bytes: int, computation: float) -> str:
    """The rate at which the network takes `ADAMS_SHARE` of a step.

    Args:
      sent_bytes: Of a step.
      computation: Its seconds.

    Returns:
      The rate, in whole megabits a second.

    Example:
      >>> auto_rate(50_000_000, 0.2)
      '105mbit'
    """
    seconds = computation * ADAMS_SHARE / (1 - ADAMS_SHARE)
    return f"{max(1.0, 8 * sent_bytes / seconds // 1e6):.0f}mbit"


def rows_of(
    config: Config, hosts: tuple[Host, ...], processes: Processes
) -> Iterator[Row]:
    """Measures every case on the same hosts at every rate."""
    rates = listed(config.rates)

    def measure(what: str, expected: float) -> list[float]:
        repeats = int(config.longest / max(expected, 1e-9))
        repeats = min(config.repeats, max(FEWEST_REPEATS, repeats))
        replies = processes.ask(
            {"measure": what, "repeats": repeats},
            config.timeout + 4 * repeats * expected,
        )
        slowest = zip(*(reply["seconds"] for reply in replies), strict=True)
        return [max(seconds) for seconds in slowest]

    for name, stage, request in cases(config):  # Adam's step, if any, is the first.
        network_hosts.limit(hosts, network_hosts.UNLIMITED)
        replies = processes.ask(request, config.timeout)
        sent_bytes = max(reply["sent_bytes"] for reply in replies)
        for place, rate in enumerate(rates):
            network_hosts.limit(hosts, network_hosts.UNLIMITED)
            whole = statistics.median(measure("call", 0.0))
            computation = max(0.0, whole - statistics.median(measure("alone", 0.0)))
            if rate == AUTO:
                rate = rates[place] = auto_rate(sent_bytes, computation)
            network_hosts.limit(hosts, rate)
            wire = 8 * sent_bytes / network_hosts.bits_per_second(rate)
            before = network_hosts.sent(hosts)
            seconds = measure("call", computation + wire)
            after = network_hosts.sent(hosts)
            left = np.subtract(after, before).max(axis=0) / (len(seconds) + 1)
            yield Row(
                hosts=len(hosts),
                devices=config.devices,
                rate=rate,
                kind=request["prepare"],
                name=name,
                stage=stage,
                seconds=seconds,
                unlimited_seconds=whole,
                computation_seconds=computation,
                sent_bytes=sent_bytes,
                tx_bytes=float(left[0]),
                packet_bytes=float(left[1]),
            )


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
    counts = checked(config)
    results = Results(
        settings={name: getattr(config, name) for name in SETTINGS},
        network=network_hosts.described(),
        processor=network_hosts.processor(),
        jax=metadata.version("jax"),
    )
    if config.json and config.json.exists():
        results.rows += read_rows(config.json, results)
    if config.page:  # What is wrong with it is said before anything is measured.
        fill(config.page.read_text("utf-8"), MARK, "")
    for count in counts:
        with (
            tempfile.TemporaryDirectory() as folder,
            network_hosts.joined(count) as hosts,
            network_processes.started(
                hosts, _worker(config, hosts), Path(folder)
            ) as processes,
        ):
            measured = rows_of(config, hosts, processes)
            for row in tqdm(measured, desc=f"{count} hosts", disable=None):
                results.add(row)
                if config.json:
                    write_json(config.json, results)
    print(tables(results))
    if config.page:
        page = config.page.read_text("utf-8")
        config.page.write_text(fill(page, MARK, tables(results)), "utf-8")
    if config.picture:
        write_picture(config.picture, results)


def _worker(config: Config, hosts: tuple[Host, ...]) -> list[str]:
    settings = {
        "coordinator": f"{hosts[0].address}:{PORT}",
        "hosts": len(hosts),
        "devices": config.devices,
        "model": config.model,
        "batch": config.batch,
        "seq": config.seq,
        "size": int(config.size),
        "topology": config.topology,
    }
    return ["-m", "benchmarks.network.worker", json.dumps(settings)]


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    # So that everything is taken down, and a second signal does not keep it from it.
    raise SystemExit(128 + number)
