"""Training from scratch: plain Adam beside an optimizer, and more steps afterwards.

A run of a task whose flags are `FromScratchFlags` trains to its goal, a number of
steps; one that has ended goes on for as many again, or to the steps that are given.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from train.core import metrics_log, picture, run_folder
from train.core.checkpoint import latest_step
from train.core.command import is_main_process, say
from train.core.comparison import closing, ended
from train.core.errors import InputError
from train.core.flags import (
    Changeable,
    Count,
    Freeze,
    TrainingFlags,
    check_flags,
    places,
    with_optimizer,
)
from train.core.loop import train
from train.core.mesh import HOST, Topology
from train.core.optimizer import Plan, warmup_and_freeze
from train.core.processes.distributed import RESTART
from train.core.run_folder import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Any, Self

    from jax.sharding import Mesh

    from train.core.processes.watchdog import Watchdog
    from train.core.task import Task

FREEZE = 0.2
"""Share of the steps after which a variance is frozen by default."""

Data = TypeVar("Data")


@dataclass(frozen=True, kw_only=True)
class FromScratchFlags(TrainingFlags):
    """Flags of every task that trains a model from scratch."""

    freeze_step: Freeze | None = None
    """Steps before 1-bit Adam, LAMB or 0/1 Adam freezes its variance; auto: once it is
    stable; default: a fifth of the steps, not before the warm-up ends."""
    steps: Changeable[Count] = 500
    """Training steps."""
    accumulate: Count = 1
    """Parts of a worker's share of the batch, computed one after another: memory for
    one; the gradients and the exchange are the whole batch's."""
    topology: Topology = "auto"
    """Compression by each device (flat), or by each host for its devices together
    (hierarchical); auto: hierarchical where several processes have several devices
    each. A run that goes on keeps its own."""
    eval_every: Changeable[Count] = 50
    """Steps between evaluations on held-out examples; there is one at the end."""
    resume: Changeable[bool] = False
    """Go on with the run in --out, exactly, with its own settings; with one that has
    ended for as many steps again, or to --steps."""
    compare: bool = False
    """Train plain Adam as well, on the same samples, and draw it beside."""

    @property
    def phases(self) -> Sequence[Plan]:
        """The stretches of steps with an optimizer each, all defaults put in."""
        warmup, freeze = warmup_and_freeze(
            self.steps, self.warmup_steps, self.freeze_step, FREEZE
        )
        plan = Plan(
            steps=self.steps,
            learning_rate=self.learning_rate,
            warmup=warmup,
            freeze=freeze,
        )
        return (plan,)

    @property
    def total_steps(self) -> int:
        """The steps of all phases."""
        return self.phases[-1].last

    @property
    def lengths(self) -> dict[str, Any]:
        """The flags by which a run is longer; its schedules are made for its own."""
        return {"steps": self.steps}

    def decided_by(self, earlier: TrainingFlags) -> Self:
        """The same flags, with the topology that the run was begun with."""
        if self.topology != "auto" or not isinstance(earlier, FromScratchFlags):
            return self
        return replace(self, topology=earlier.topology)


Flags = TypeVar("Flags", bound=FromScratchFlags)


def check_from_scratch(config: FromScratchFlags) -> None:
    """Refuses values that no task can be trained with.

    Args:
      config: The flags.

    Raises:
      InputError: A flag's value is out of its range, or contradicts another.
    """
    check_flags(config)
    if config.compare and config.optimizer == "adam":
        raise InputError("--compare trains plain Adam beside; drop --optimizer adam.")


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
      load: From flags, and the run that goes on, to the names of the data by their
        contents and to the data; refuses data that are not the run's.

    Returns:
      The run, with the flags that it began with, and its data.

    Raises:
      InputError: The folder is taken, or does not hold this run, or the run cannot go
        on to the steps that are asked for.
    """
    topology = "hierarchical" if HOST in mesh.axis_names else "flat"
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
    # It goes on elsewhere with what it has decided.
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

    Raises:
      InputError: Processes differ in what they are asked for, or a checkpoint cannot
        be gone on from.
    """
    folder = config.out
    runs = [replace(run, flags=arm) for arm in _arms(run.flags)]
    run_folder.agree(runs, config, keep_files, watchdog)
    say(
        f"{folder}: {about}, {mesh.size} workers "
        f"({mesh.devices.flat[0].platform}), to step {run.until:,}"
    )
    # The run's own number of steps is what its schedules were made for.
    arms = _arms(replace(config, **run.flags.lengths))
    for arm, of_arm in zip(arms, runs, strict=True):
        if latest_step(arm.out) < run.until:
            begin = partial(run_folder.write, of_arm)
            train(make_task(arm), arm, run.until, mesh, watchdog, begin)
    if is_main_process():
        lines = {arm.optimizer: metrics_log.read(arm.out) for arm in arms}
        picture.draw(folder / picture.FILE, lines)
        say(f"{folder / picture.FILE}: loss and bytes sent")
        found = [ended(name, x, config.batch) for name, x in lines.items()]
        if len(both := [each for each in found if each]) == 2:
            say(closing(*both))


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
