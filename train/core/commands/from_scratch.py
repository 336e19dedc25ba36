"""Training from scratch: plain Adam beside an optimizer, and more steps afterwards.

A run of a task whose flags are `FromScratchFlags` trains to its goal, a number of
steps; one that has ended goes on to the steps that are given, where they are more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from train.core import metrics_log, picture, run_folder
from train.core.checkpoint import latest_step
from train.core.commands.flags import FromScratchFlags
from train.core.comparison import closing, ended
from train.core.errors import InputError, writable
from train.core.flags import places, with_optimizer
from train.core.loop import train
from train.core.mesh import kept_topology
from train.core.output import is_main_process, say
from train.core.run_folder import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from jax.sharding import Mesh

    from train.core.processes.watchdog import Watchdog
    from train.core.task import Task

Data = TypeVar("Data")
Flags = TypeVar("Flags", bound=FromScratchFlags)


def open_run(
    config: Flags,
    module: str,
    mesh: Mesh,
    load: Callable[[Flags, Run[Flags] | None], tuple[Mapping[str, str], Data]],
) -> tuple[Run[Flags], Data]:
    """The run that begins or goes on, and its data.

    Args:
      config: The flags.
      module: What Python runs.
      mesh: The workers.
      load: From flags, and the run that goes on, to the hashes of the data by their
        kind and to the data; refuses data that are not the run's.

    Returns:
      The run, with the flags that it began with, and its data.

    Raises:
      InputError: The folder is taken, or does not hold this run, or the run cannot go
        on to the steps that are asked for; or a new one would never compress.
    """
    topology = kept_topology(mesh, config.out, goes_on=config.resume)
    if not config.resume:
        for arm in _arms(config):
            run_folder.check_free(arm.out)
        contents, data = load(config, None)
        flags = replace(config, topology=topology)
        return Run(module, flags, contents, config.total_steps), data
    run = run_folder.read(config.out, module, type(config))
    for arm in _arms(run.flags):
        # The schedules are made for a number of steps.
        run_folder.check_same(replace(run, flags=arm), set(arm.lengths))
    # Its folders may be others now; the topology is written out, no longer auto.
    moved = replace(run.flags, **places(config), topology=topology)
    run = replace(run, flags=moved)
    run = replace(run, until=_next_goal(run, config))
    return run, load(run.flags, run)[1]


def train_run(
    run: Run[Flags],
    config: Flags,
    mesh: Mesh,
    watchdog: Watchdog,
    *,
    about: str,
    make_task: Callable[[Flags], Task],
    keep_files: Callable[[Path], None],
    last_file: str | None = None,
) -> None:
    """Trains each optimizer to a run's goal, and draws them beside each other.

    Args:
      run: The run.
      config: The flags of this process's command line.
      mesh: The workers.
      watchdog: Told of each wait for the other processes.
      about: What is trained, in some words.
      make_task: From the flags of one optimizer to what it trains.
      keep_files: Writes into the run's folder what it lacks, on one process.
      last_file: What a task writes last into its folder, at its end, if anything. If
        all steps are done and it is missing, as after a kill there, the end runs anew.

    Raises:
      InputError: Another run uses the folder, processes differ in what they are asked
        for, or a checkpoint cannot be gone on from.
    """
    folder = config.out
    runs = [replace(run, flags=arm) for arm in _arms(run.flags)]
    # The run's own number of steps is what its schedules were made for.
    arms = _arms(replace(config, **run.flags.lengths))
    with run_folder.begun(runs, config, keep_files, watchdog):
        say(
            f"{folder}: {about}, {mesh.size} workers "
            f"({mesh.devices.flat[0].platform}), to step {run.until:,}"
        )
        is_drawn = False
        for arm, of_arm in zip(arms, runs, strict=True):
            is_whole = last_file is None or (arm.out / last_file).exists()
            if latest_step(arm.out) < run.until or not is_whole:
                begin = partial(_begin, of_arm, last_file)
                train(make_task(arm), arm, run.until, mesh, watchdog, begin)
                is_drawn = not config.compare  # or else without the other
        if is_main_process():
            lines = {arm.optimizer: metrics_log.read(arm.out) for arm in arms}
            if not is_drawn:
                with writable(folder):
                    picture.draw(folder / picture.FILE, lines)
            say(f"{folder / picture.FILE}: loss and bytes sent")
            found = [ended(name, x, run.flags.phases) for name, x in lines.items()]
            if len(both := [each for each in found if each]) == 2:
                say(closing(*both))
                if run.flags.optimizer != "onebit_adam":
                    say(
                        f"both at one --learning-rate; {run.flags.optimizer} has a "
                        "best one of its own (docs/choosing.md)"
                    )


def _begin(run: Run, last_file: str | None) -> None:
    """Writes the run that goes on, and removes the last file of its earlier end."""
    if last_file and is_main_process():
        with writable(run.flags.out):
            (run.flags.out / last_file).unlink(missing_ok=True)
    run_folder.write(run)


def _arms(config: Flags) -> list[Flags]:
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


def _next_goal(run: Run[Flags], config: Flags) -> int:
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
