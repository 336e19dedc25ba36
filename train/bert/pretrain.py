"""`python -m train.pretrain`: pre-trains a BERT with 1-bit Adam.

`--help` lists the flags. A run leaves in its folder `config.json` (what was asked
for), `vocab.txt`, `checkpoints`, `metrics.jsonl` and `training.png`; with `--compare`
plain Adam's own are in the folder `adam` inside it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from train.bert.config import PretrainConfig, check, without_second_phase
from train.bert.data import VOCABULARY_FILE, keep_vocabulary, load_phases
from train.bert.presets import PRESETS
from train.bert.task import make_task
from train.core import metrics_log, picture, run_folder
from train.core.checkpoint import latest_step
from train.core.command import (
    is_main_process,
    join,
    one_sentence,
    read_flags,
    say,
    watched,
)
from train.core.errors import InputError
from train.core.flags import check_resumable, with_optimizer
from train.core.loop import train
from train.core.mesh import HOST, check_attention, check_divisible, make_mesh
from train.core.processes.distributed import RESTART, Cluster
from train.core.run_folder import Run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jax.sharding import Mesh

    from models import BertConfig
    from train.bert.data import Data
    from train.core.processes.watchdog import Watchdog

MODULE = "train.pretrain"


@dataclass(frozen=True)
class Command:
    """Pre-trains BERT on text, by workers that exchange one bit a parameter."""

    training: PretrainConfig = field(default_factory=PretrainConfig)
    cluster: Cluster = field(default_factory=Cluster)


def parse(arguments: Sequence[str]) -> Command:
    """Reads the flags; a preset, or a run that goes on, has those not given."""
    given = read_flags(Command(), arguments, MODULE)
    config = given.training
    if not config.resume:
        if config.preset is None:
            return given
        preset = PRESETS[config.preset]
        preset = with_optimizer(preset, config.optimizer)
        if config.vocab:
            preset = replace(preset, vocab_size=None)
        given = read_flags(Command(preset), arguments, MODULE)
        if given.training.long_seq is None:  # its second phase is left out
            given = replace(given, training=without_second_phase(given.training))
        return given
    earlier = run_folder.read(config.out, MODULE, PretrainConfig).flags
    given = read_flags(Command(replace(earlier, resume=True)), arguments, MODULE)
    if given.training.topology == "auto":  # it has been decided
        decided = replace(given.training, topology=earlier.topology)
        given = replace(given, training=decided)
    check_resumable(earlier, given.training, earlier.fixed)
    return given


def pretrain(
    config: PretrainConfig,
    timeout: float = Cluster.timeout,
    size: BertConfig | None = None,
) -> None:
    """Trains what the flags ask for and draws the picture.

    Args:
      config: The flags, the same in all processes.
      timeout: Seconds that what needs the other processes may take.
      size: The model's; None for the one that the flags name.

    Raises:
      InputError: The flags, or what they name, cannot be used.
      LostError: Another process is gone.
    """
    check(config)
    mesh = make_mesh(config.workers, config.topology)
    for phase in config.phases:
        check_divisible(phase.batch, mesh, phase.accumulate, phase.flags)
    check_attention(config.attention, mesh)
    with watched(timeout) as watchdog:
        run, data = _opened(config, mesh)
        _train_arms(config, run, data, mesh, watchdog, size)


def _opened(
    config: PretrainConfig, mesh: Mesh
) -> tuple[Run[PretrainConfig], list[Data]]:
    """The run that begins or goes on, and its data."""
    topology = "hierarchical" if HOST in mesh.axis_names else "flat"
    folder = config.out
    if not config.resume:
        for arm in _arms(config):
            run_folder.check_free(arm.out)
        data = load_phases(config, folder)
        flags = replace(config, topology=topology)
        return Run(MODULE, flags, data[0].contents, config.total_steps), data
    run = run_folder.read(folder, MODULE, PretrainConfig)
    for arm in _arms(run.flags):
        # The schedules are made for a number of steps.
        run_folder.check_same(replace(run, flags=arm), {"steps", "long_steps"})
    # It goes on elsewhere with what it has decided.
    moved = replace(
        run.flags, corpus=config.corpus, tokens=config.tokens, topology=topology
    )
    run = replace(run, flags=moved)
    run = replace(run, until=_next_goal(run, config))
    return run, load_phases(run.flags, folder, run)


def _train_arms(
    config: PretrainConfig,
    run: Run[PretrainConfig],
    data: list[Data],
    mesh: Mesh,
    watchdog: Watchdog,
    size: BertConfig | None,
) -> None:
    """Trains each optimizer to the run's goal, and draws them beside each other."""
    folder, vocabulary = config.out, data[0].vocabulary

    def keep_files(folder: Path) -> None:
        # A run that goes on has it, unless it was lost.
        if not (config.resume and (folder / VOCABULARY_FILE).exists()):
            keep_vocabulary(vocabulary, folder)

    runs = [replace(run, flags=arm) for arm in _arms(run.flags)]
    run_folder.agree(runs, config, keep_files, watchdog)
    say(
        f"{folder}: BERT {config.model}, {len(vocabulary):,} word pieces, "
        f"{mesh.size} workers ({mesh.devices.flat[0].platform}), to step {run.until:,}"
    )
    # The run's own number of steps is what its schedules were made for.
    steps = {"steps": run.flags.steps, "long_steps": run.flags.long_steps}
    arms = _arms(replace(config, **steps))
    for arm, of_arm in zip(arms, runs, strict=True):
        if latest_step(arm.out) < run.until:
            task = make_task(arm, data, mesh, run.until, size)
            begin = partial(run_folder.write, of_arm)
            train(task, arm, run.until, mesh, watchdog, begin)
    if is_main_process():
        lines = {arm.optimizer: metrics_log.read(arm.out) for arm in arms}
        picture.draw(folder / picture.FILE, lines)
        say(f"{folder / picture.FILE}: loss and bytes sent")


def _arms(config: PretrainConfig) -> list[PretrainConfig]:
    """The flags of each optimizer's training, its folder among them."""
    if not config.compare:
        return [config]
    adam = replace(
        with_optimizer(config, "adam"),
        compare=False,
        out=config.out / "adam",
        topology="auto",
    )
    return [config, adam]


def _next_goal(run: Run[PretrainConfig], config: PretrainConfig) -> int:
    """The steps to go on to: those asked for, or as many again after a finished run."""
    planned, asked = run.flags.total_steps, config.total_steps
    if asked > run.until:
        return asked
    if asked != planned and asked < run.until:
        phase = config.phases[-1]
        raise InputError(
            f"the run in {config.out} goes to step {run.until}; leave out "
            f"{phase.flags}steps {phase.steps} to go on, or give more."
        )
    unfinished = min(latest_step(arm.out) for arm in _arms(config)) < run.until
    # A launcher starts again what failed at its very end, too; and who gives again
    # the steps that were given last asks for no more than them.
    if unfinished or asked != planned or os.environ.get(RESTART, "0") != "0":
        return run.until
    more = run.flags.phases[-1].steps
    say(
        f"{config.out}: all {run.until:,} steps are done; going on for {more:,} more "
        "by the last schedule"
    )
    return run.until + more


def main(size: BertConfig | None = None) -> None:
    """Runs the command line; a mistake in it ends in one sentence.

    Args:
      size: The model's; None for the one that the flags name.
    """
    with one_sentence():
        command = parse(sys.argv[1:])
        check(command.training)
        join(command.cluster, command.training.workers)
        pretrain(command.training, command.cluster.timeout, size)
