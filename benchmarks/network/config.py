"""The flags of `python -m benchmarks.network`, and the workloads that they name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from benchmarks.convergence.arms import stage_bytes
from benchmarks.convergence.plan import read_plan
from benchmarks.network.hosts import bits_per_second
from benchmarks.network.results import BASELINES
from train.core.exchange import EXCHANGES
from train.core.mesh import AXIS
from train.core.totals import EVERY

AUTO = "auto"
"""The rate at which the network takes most of Adam's step."""


@dataclass(frozen=True)
class Config:
    """Measures steps and exchanges on slow links. Lists are separated by commas."""

    hosts: str = "2,4"
    """Numbers of hosts."""
    rates: str = "100mbit,1gbit"
    """Rates of each host's link, such as 100mbit, 2.5gbit, unlimited or auto."""
    optimizers: str = "adam,onebit_adam"
    """Optimizers whose training steps are taken; "" for none."""
    exchanges: str = "pmean,sign_mean"
    """Exchanges by themselves: of pmean, sign_mean and count_mean."""
    onebit_exchanges: str = "sign_mean"
    """1-bit Adam's exchanges: of sign_mean and count_mean."""
    plan: Path | None = None
    """A study of `benchmarks.convergence`, whose arms' steps are taken instead."""
    model: Literal["tiny", "mini", "small", "medium", "base", "large"] = "mini"
    """Size of the BERT."""
    batch: int = 1
    """Sequences a device."""
    seq: int = 16
    """Tokens a sequence."""
    size: float = 1.1e7
    """Values of an exchange by itself."""
    devices: int = 1
    """Virtual devices a host, which compresses for several of them together."""
    repeats: int = 11
    """Measured times, of which the median counts."""
    longest: float = 30
    """Seconds that the repeats of a row may take; three are made in any case."""
    timeout: float = 600
    """Seconds that a process may take to compile, or longer than expected to measure,
    before the run is given up."""
    json: Path | None = None
    """The JSON for the results, which keeps those of other hosts, devices and rates."""
    page: Path | None = None
    """Markdown, whose tables between its two marks are written anew."""
    clean: bool = False
    """Only take down the hosts of runs that were killed."""


class Workload(NamedTuple):
    """A training step in one stage, or an exchange by itself.

    Attributes:
      kind, name, stage: As of `benchmarks.network.results.Measurement`.
      prepare: What the worker prepares: a step, one of a study's arm, an exchange.
      arguments: Arguments of the worker's function that prepares it.
    """

    kind: Literal["step", "exchange"]
    name: str
    stage: str | None
    prepare: Literal["step", "arm", "exchange"]
    arguments: dict[str, Any]


def listed(text: str) -> list[str]:
    """The parts of a list that is separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def workloads(config: Config) -> list[Workload]:
    """The workloads that the flags name, baselines first.

    Raises:
      SystemExit: A name is unknown.
    """
    optimizers = _known(config.optimizers, "--optimizers", ("adam", "onebit_adam"))
    exchanges = _known(config.exchanges, "--exchanges", ("pmean", *EXCHANGES))
    onebit_exchanges = _known(config.onebit_exchanges, "--onebit-exchanges", EXCHANGES)

    def step(name: str, optimizer: str, exchange: str, stage: str | None) -> Workload:
        arguments = {"optimizer": optimizer, "exchange": exchange, "stage": stage}
        return Workload("step", name, stage, "step", arguments)

    chosen = _arms(config.plan) if config.plan else []
    for optimizer in [] if config.plan else optimizers:
        if optimizer == "adam":
            chosen.append(step("adam", optimizer, "sign_mean", None))
            continue
        chosen.append(step(optimizer, optimizer, "sign_mean", "warmup"))
        for exchange in onebit_exchanges:
            name = optimizer + ("" if exchange == "sign_mean" else f", {exchange}")
            chosen.append(step(name, optimizer, exchange, "compressed"))
    for exchange in exchanges:
        arguments = {"name": exchange}
        chosen.append(Workload("exchange", exchange, None, "exchange", arguments))
    return sorted(chosen, key=lambda each: each.name not in BASELINES.values())


def _arms(file: Path) -> list[Workload]:
    """A step of each arm of a study in each of its stages, the baseline as Adam."""
    study, chosen = read_plan(file), []
    for arm, options in study.arms.items():
        name = BASELINES["step"] if arm == study.baseline else arm
        for stage in stage_bytes(options, {"": jnp.zeros([])}, 2, AXIS):
            if "/" not in stage:  # a part of another's steps
                static = None if stage == EVERY else stage
                arguments = {"options": dict(options), "stage": static}
                chosen.append(Workload("step", name, static, "arm", arguments))
    return chosen


def _known(text: str, flag: str, known: Collection[str]) -> list[str]:
    names = listed(text)
    for name in names:
        if name not in known:
            raise SystemExit(f"{flag} takes {', '.join(known)}, not {name!r}.")
    return names


def host_counts(config: Config) -> list[int]:
    """The numbers of hosts, each 2 or more, of flags that can be measured with.

    Raises:
      SystemExit: A flag's value cannot be used.
    """
    if config.plan and config.devices > 1:
        raise SystemExit("--plan takes hosts of one device: drop --devices.")
    names = [workload.name for workload in workloads(config)]
    for rate in listed(config.rates):
        if rate == AUTO and "adam" not in names:
            raise SystemExit("--rates auto is found from Adam's step: measure it too.")
        if rate != AUTO:
            try:
                bits_per_second(rate)
            except ValueError as error:
                raise SystemExit(f"--rates: {error}.") from None
    numbers = config.devices, config.batch, config.seq, config.repeats, config.size
    if not all(number >= 1 for number in numbers):  # NaN is not
        raise SystemExit(
            "--devices, --batch, --seq, --repeats and --size must be at least 1."
        )
    if not (config.longest > 0 and config.timeout > 0):
        raise SystemExit("--longest and --timeout must be positive numbers of seconds.")
    if config.json and not config.json.parent.is_dir():
        folder = config.json.parent
        raise SystemExit(f"--json {config.json}: there is no folder {folder}.")
    if config.page and not config.page.is_file():
        raise SystemExit(f"--page {config.page}: there is no such file.")
    counts = listed(config.hosts)
    if not all(count.isdecimal() and int(count) > 1 for count in counts):
        raise SystemExit(f"--hosts takes numbers from 2 on, not {config.hosts!r}.")
    return [int(count) for count in counts]
