"""`python -m train.pretrain`: pre-trains a BERT with 1-bit Adam.

`--help` lists the flags. A run leaves in its folder `config.json` (what was asked
for), `vocab.txt`, `checkpoints`, `metrics.jsonl` and `training.png`; with `--compare`
plain Adam's own are in the folder `adam` inside it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import jax

from train.bert.config import (
    PretrainConfig,
    check,
    check_resumable,
    to_json,
    without_freeze,
    without_second_phase,
)
from train.bert.data import VOCABULARY_FILE, keep_vocabulary, load_phases
from train.bert.presets import PRESETS
from train.core import metrics_log as record
from train.core import picture, run_folder
from train.core.checkpoint import latest_step
from train.core.command import (
    is_main_process,
    join,
    one_sentence,
    read_flags,
    say,
    watched,
)
from train.core.distributed import RESTART, Cluster, check_agreed, check_shared
from train.core.errors import InputError, writable
from train.core.loop import train
from train.core.mesh import HOST, check_attention, make_mesh
from train.core.run_folder import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Mesh

    from train.bert.phases import Phase
    from train.core.watchdog import Watchdog


@dataclass(frozen=True)
class Command:
    """Pre-trains BERT on text, by workers that exchange one bit a parameter."""

    training: PretrainConfig = field(default_factory=PretrainConfig)
    cluster: Cluster = field(default_factory=Cluster)


def parse(arguments: Sequence[str]) -> Command:
    """Reads the flags; a preset, or a run that goes on, has those not given."""
    given = read_flags(Command(), arguments, "train.pretrain")
    config = given.training
    if not config.resume:
        if config.preset is None:
            return given
        preset = PRESETS[config.preset]
        if config.optimizer == "adam":
            preset = without_freeze(preset)
        if config.vocab:
            preset = replace(preset, vocab_size=None)
        given = read_flags(Command(preset), arguments, "train.pretrain")
        if given.training.long_seq is None:  # its second phase is left out
            given = replace(given, training=without_second_phase(given.training))
        return given
    stored = run_folder.read(config.out).config
    own = replace(stored, out=config.out, resume=True)
    given = read_flags(Command(own), arguments, "train.pretrain")
    if given.training.topology == "auto":  # it has been decided
        own_topology = replace(given.training, topology=stored.topology)
        given = replace(given, training=own_topology)
    check_resumable(stored, given.training)
    return given


def pretrain(config: PretrainConfig, timeout: float = Cluster.timeout) -> None:
    """Trains what the flags ask for and draws the picture.

    Args:
      config: The flags, the same in all processes.
      timeout: Seconds that what needs the other processes may take.

    Raises:
      InputError: The flags, or what they name, cannot be used.
      LostError: Another process is gone.
    """
    check(config)
    mesh = make_mesh(config.workers, config.topology)
    for phase in config.phases:
        check_divisible(phase, mesh.size)
    check_attention(config.attention, mesh)
    with watched(timeout) as watchdog:
        _pretrain(config, mesh, watchdog)


def check_divisible(phase: Phase, workers: int) -> None:
    """Refuses a batch that cannot be shared equally.

    Args:
      phase: Whose batch.
      workers: Who share it.

    Raises:
      InputError: Workers, or micro-batches, would differ in size.
    """
    if phase.batch % workers:
        raise InputError(
            f"{phase.flags}batch {phase.batch} cannot be shared equally by {workers} "
            "workers; make it a multiple, or give --workers."
        )
    share = phase.batch // workers
    if share % phase.accumulate:
        raise InputError(
            f"{phase.flags}accumulate {phase.accumulate} cannot divide the {share} "
            f"sequences of each of {workers} workers; give a divisor."
        )


def _pretrain(config: PretrainConfig, mesh: Mesh, watchdog: Watchdog) -> None:
    folder = config.out
    if config.resume:
        run = run_folder.read(folder)
        # It may have been moved since it was written.
        run = replace(run, config=replace(run.config, out=folder))
        for arm in _arms(run.config):
            run_folder.check_own(replace(run, config=arm))
        moved = replace(run.config, corpus=config.corpus, tokens=config.tokens)
        run = replace(run, config=_decided(moved, mesh))
        run = replace(run, until=_next_goal(run, config))
        data = load_phases(run.config, folder, run)
    else:
        for arm in _arms(config):
            run_folder.check_free(arm.out)
        data = load_phases(config, folder)
        text = data[0].corpus, data[0].vocabulary_name
        run = Run(_decided(config, mesh), *text, config.total_steps)
    # The run's own number of steps is what its schedules were made for.
    own = {"steps": run.config.steps, "long_steps": run.config.long_steps}
    arms = _arms(replace(config, **own))
    vocabulary = data[0].vocabulary
    watchdog.expect("the start of all processes")
    # Nothing is written before all have seen the folder as it was.
    check_agreed(
        {
            "corpus": run.corpus,
            "vocabulary": run.vocabulary,
            "set of flags": json.dumps(to_json(config)),
            "newest checkpoint in --out": str([latest_step(arm.out) for arm in arms]),
            "JAX": jax.__version__,
        }
    )
    # A run that goes on has it, unless it was lost.
    kept = config.resume and (folder / VOCABULARY_FILE).exists()
    if is_main_process() and not kept:
        with writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            keep_vocabulary(vocabulary, folder)
    check_shared(folder / VOCABULARY_FILE)
    say(
        f"{folder}: BERT {config.model}, {len(vocabulary):,} word pieces, "
        f"{mesh.size} workers ({mesh.devices.flat[0].platform}), to step {run.until:,}"
    )
    for arm, stored in zip(arms, _arms(run.config), strict=True):
        if latest_step(arm.out) < run.until:
            remember = partial(_remember, replace(run, config=stored))
            # A folder with a checkpoint in it must say whose it is.
            if not run_folder.exists(arm.out):
                remember()
            train(arm, data, mesh, run.until, remember, watchdog)
    if is_main_process():
        lines = {arm.optimizer: record.read(arm.out) for arm in arms}
        picture.draw(folder / picture.FILE, lines)
        say(f"{folder / picture.FILE}: loss and bytes sent")


def _arms(config: PretrainConfig) -> list[PretrainConfig]:
    """The flags of each optimizer's training, its folder among them."""
    if not config.compare:
        return [config]
    adam = replace(
        without_freeze(config),
        optimizer="adam",
        compare=False,
        out=config.out / "adam",
        wire="signs",
        topology="auto",
    )
    return [config, adam]


def _decided(config: PretrainConfig, mesh: Mesh) -> PretrainConfig:
    """The flags with a topology that stays when the run goes on elsewhere."""
    topology = "hierarchical" if HOST in mesh.axis_names else "flat"
    return replace(config, topology=topology)


def _remember(run: Run) -> None:
    if is_main_process():
        run_folder.write(run)


def _next_goal(run: Run, config: PretrainConfig) -> int:
    """The steps to go on to: those asked for, or as many again after a finished run."""
    own, asked = run.config.total_steps, config.total_steps
    if asked > run.until:
        return asked
    if asked != own and asked < run.until:
        phase = config.phases[-1]
        raise InputError(
            f"the run in {config.out} goes to step {run.until}; leave out "
            f"{phase.flags}steps {phase.steps} to go on, or give more."
        )
    unfinished = min(latest_step(arm.out) for arm in _arms(config)) < run.until
    # A launcher starts again what failed at its very end, too; and who gives again
    # the steps that were given last asks for no more than them.
    if unfinished or asked != own or os.environ.get(RESTART, "0") != "0":
        return run.until
    more = run.config.phases[-1].steps
    say(
        f"{config.out}: all {run.until:,} steps are done; going on for {more:,} more "
        "by the last schedule"
    )
    return run.until + more


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence."""
    with one_sentence():
        command = parse(sys.argv[1:])
        check(command.training)
        join(command.cluster, command.training.workers)
        pretrain(command.training, command.cluster.timeout)
