"""A task's command: its flags, and a run that begins, goes on or goes further.

`run_command` is what `python -m` enters, and `train_from_scratch` the way from flags to
a trained model of every task whose flags are `FromScratchFlags`: it opens the run, and
trains it and, where that is asked for, others beside it. A run that has ended goes
on to the steps that are given, where they are more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import tyro

from train.core import metrics_log, picture, run_folder
from train.core.checkpoint import latest_step
from train.core.comparison import closing, ended
from train.core.errors import InputError, writable
from train.core.flags import (
    FromScratchFlags,
    TrainingFlags,
    TransformerFlags,
    check_resumable,
    places,
    with_optimizer,
)
from train.core.loop import train
from train.core.mesh import (
    check_attention,
    check_divisible,
    kept_topology,
    make_mesh,
)
from train.core.output import is_main_process, say
from train.core.processes.distributed import Cluster
from train.core.processes.session import join, one_sentence, watched
from train.core.run_folder import Run

if TYPE_CHECKING:
    from pathlib import Path

    from jax.sharding import Mesh

    from train.core.task import Task

Data = TypeVar("Data")
Flags = TypeVar("Flags", bound=TrainingFlags)
FromScratch = TypeVar("FromScratch", bound=FromScratchFlags)
Load = Callable[[FromScratch, Run[FromScratch] | None], tuple[Mapping[str, str], Data]]


@dataclass(frozen=True)
class Command(Generic[Flags]):
    """A command line: the flags of the task, and those of `jax.distributed`."""

    training: Flags
    cluster: Cluster = field(default_factory=Cluster)


def run_command(
    parse: Callable[[Sequence[str]], Command[Flags]],
    check: Callable[[Flags], object],
    run: Callable[[Flags, float], None],
) -> None:
    """Runs the command line of this process; a mistake in it ends in one sentence.

    Args:
      parse: Reads it.
      check: Refuses flags before the other processes are waited for.
      run: Does what the flags ask for; its second argument are the seconds that what
        needs the other processes may take.
    """
    with one_sentence():
        command = parse(sys.argv[1:])
        check(command.training)
        join(command.cluster, command.training.workers)
        run(command.training, command.cluster.timeout)


def read_flags(default: Flags, arguments: Sequence[str], module: str) -> Command[Flags]:
    """Reads the command line of a module, with the flags for those not given.

    The docstring of the flags' class is what `--help` begins with.
    """
    kind = type(default)
    return tyro.cli(
        Command[kind],
        args=arguments,
        default=Command(default),
        prog=f"python -m {module}",
        description=kind.__doc__,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def parse_flags(
    default: Flags, arguments: Sequence[str], module: str
) -> Command[Flags]:
    """As `read_flags`; a run that goes on has its own flags for those not given."""
    given = read_flags(default, arguments, module)
    if given.training.resume:
        earlier = run_folder.read(given.training.out, module, type(default)).flags
        given = read_flags(replace(earlier, resume=True), arguments, module)
        check_resumable(earlier, given.training)
    return given


def train_from_scratch(
    config: FromScratch,
    module: str,
    timeout: float,
    *,
    load: Load[FromScratch, Data],
    about: Callable[[Data], str],
    make_task: Callable[[FromScratch, Data, Mesh, int], Task],
    keep_files: Callable[[Data, Path], None] = lambda data, folder: None,
) -> None:
    """Trains each optimizer of a run to its goal, and draws them beside each other.

    Args:
      config: The flags of this process's command line.
      module: What Python runs.
      timeout: Seconds that what needs the other processes may take.
      load: From flags, and the run that goes on, to the hashes of the data by their
        kind and to the data; refuses data that are not the run's.
      about: From the data to what is trained, in some words.
      make_task: From the flags of one optimizer, the data, the workers and the steps to
        have trained at the end to what it trains.
      keep_files: Writes what the run's folder lacks of the data into it.

    Raises:
      InputError: The workers cannot share a batch; or the folder is taken, or is not
        this run's; or processes differ in what they are asked for; or the run, or a
        checkpoint, cannot be gone on from.
      LostError: Another process is gone.
    """
    mesh = make_mesh(config.workers, config.topology)
    for plan in config.phases:
        check_divisible(plan.batch, mesh, plan.accumulate, plan.prefix)
    if isinstance(config, TransformerFlags):
        check_attention(config.attention, mesh)
    with watched(timeout) as watchdog:
        run, data = _opened(config, module, mesh, load)
        runs = [replace(run, flags=arm) for arm in _arms(run.flags)]
        # The run's own number of steps is what its schedules were made for.
        arms = _arms(replace(config, **run.flags.lengths))
        with run_folder.begun(runs, config, partial(keep_files, data), watchdog):
            say(
                f"{config.out}: {about(data)}, {mesh.size} workers "
                f"({mesh.devices.flat[0].platform}), to step {run.until:,}"
            )
            for arm, of_arm in zip(arms, runs, strict=True):
                task = make_task(arm, data, mesh, run.until)
                begin = partial(run_folder.write, of_arm)
                train(task, arm, run.until, mesh, watchdog, begin)
            if is_main_process():
                _report(run, {arm.optimizer: arm.out for arm in arms})


def _opened(
    config: FromScratch, module: str, mesh: Mesh, load: Load[FromScratch, Data]
) -> tuple[Run[FromScratch], Data]:
    """The run that begins or goes on, with the flags it began with, and its data."""
    topology = kept_topology(mesh, config.out, goes_on=config.resume)
    if not config.resume:
        for arm in _arms(config):
            run_folder.check_free(arm.out)
        contents, data = load(config, None)
        flags = replace(config, topology=topology)
        return Run(module, flags, contents, config.total_steps), data
    run = run_folder.read(config.out, module, type(config))
    # Its folders may be others now; the topology is written out, no longer auto.
    flags = replace(run.flags, **places(config), topology=topology)
    run = replace(run, flags=flags, until=_next_goal(run, config))
    return run, load(run.flags, run)[1]


def _arms(config: FromScratch) -> list[FromScratch]:
    """The flags of each optimizer's training, its folder among them."""
    if not config.compare:
        return [config]
    beside = [
        replace(
            with_optimizer(config, name),
            compare=False,
            out=config.out / name,
            topology="auto",
            **flags,
        )
        for name, flags in config.compared.items()
        if name != config.optimizer
    ]
    return [config, *beside]


def _next_goal(run: Run[FromScratch], config: FromScratch) -> int:
    """The steps to go on to: those asked for, or else the run's own."""
    planned, asked = run.flags.total_steps, config.total_steps
    phase = config.phases[-1]
    if asked < run.until and asked != planned:
        raise InputError(
            f"the run in {config.out} goes to step {run.until}; leave out "
            f"{phase.prefix}steps {phase.steps} to go on, or give more."
        )
    goal = max(asked, run.until)
    if min(latest_step(arm.out) for arm in _arms(config)) >= goal:
        say(
            f"{config.out}: all {goal:,} steps are done; to go on, at the learning "
            f"rate that they have come to, give more {phase.prefix}steps"
        )
    return goal


def _report(run: Run[FromScratch], folders: Mapping[str, Path]) -> None:
    """Draws the optimizers beside each other, and compares how they ended."""
    out = run.flags.out
    lines = {name: metrics_log.read(folder) for name, folder in folders.items()}
    if run.flags.compare:
        with writable(out):
            picture.draw(out / picture.FILE, lines)
    say(f"{out / picture.FILE}: loss and bytes sent")
    every = (ended(name, x, run.flags.phases) for name, x in lines.items())
    found = {each.name: each for each in every if each}
    beside = found.pop("adam", None)
    if beside and found:
        say(closing(beside, *found.values()))
        if found.keys() != {"onebit_adam"}:
            say(
                "all at one --learning-rate; each optimizer has a best one of its own "
                "(docs/choosing.md)"
            )
