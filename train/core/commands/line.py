"""The command line of a task: new flags, or those of the run that is resumed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import tyro

from train.core import run_folder
from train.core.flags import TrainingFlags, check_resumable
from train.core.output import say_warnings
from train.core.processes.distributed import Cluster
from train.core.processes.session import join, one_sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Flags = TypeVar("Flags", bound=TrainingFlags)


@dataclass(frozen=True)
class Command(Generic[Flags]):
    """A command line.

    Attributes:
      training: The flags of the task.
      cluster: Those of `jax.distributed`.
    """

    training: Flags
    cluster: Cluster = field(default_factory=Cluster)


def read_flags(default: Flags, arguments: Sequence[str], module: str) -> Command[Flags]:
    """Reads a command line.

    Args:
      default: The flags as they are where they are not given; the docstring of their
        class is what `--help` begins with.
      arguments: The command line's.
      module: What Python runs.

    Returns:
      The flags.
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
    """Reads a command line; a run that goes on has its own flags for those not given.

    Args:
      default: As of `read_flags`.
      arguments: The command line's.
      module: What Python runs.

    Returns:
      The flags.

    Raises:
      InputError: The run that is to go on cannot be read, or not with these flags.
    """
    given = read_flags(default, arguments, module)
    if not given.training.resume:
        return given
    earlier = run_folder.read(given.training.out, module, type(default)).flags
    given = read_flags(replace(earlier, resume=True), arguments, module)
    given = replace(given, training=given.training.decided_by(earlier))
    check_resumable(earlier, given.training, earlier.fixed)
    return given


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
    say_warnings()
    with one_sentence():
        command = parse(sys.argv[1:])
        check(command.training)
        join(command.cluster, command.training.workers)
        run(command.training, command.cluster.timeout)
