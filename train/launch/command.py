"""`python -m train.launch --processes 4 -- -m train.pretrain …`: starting again.

It is `onebit-launch`, for commands that can go on with a run. With `--restarts`, a
command with `--out FOLDER` is started again after a failure, with `--resume` added
where it has begun a run in FOLDER, else as it was.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from onebit_launch import command as launcher
from onebit_launch.command import Launch
from onebit_launch.errors import USAGE_EXIT, UsageError
from onebit_launch.output import say

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIG_FILE = "config.json"
"""A file of a run's folder: where it is, `--resume` can go on."""

MODULE = "python -m train.launch"


def launch(flags: Launch, restarts: int, command: Sequence[str]) -> int:
    """Runs a command in several processes, again after failures where asked to.

    Args:
      flags: The launcher's flags.
      restarts: Times to start all again after a failure, but for one that another
        attempt would repeat: a mistake on the command line, or one that the command
        says in a sentence how to mend.
      command: Arguments of Python: `-m module` or a script, and its flags.

    Returns:
      0, or the exit status of the process that failed first in the last attempt,
      128 and the signal's number if it ended by one.

    Raises:
      UsageError: The flags cannot be used.
    """
    launcher.check(flags, command)
    folder = run_folder_of(command)
    check_restarts(restarts, folder)
    # A run that was there before is not this command's to go on with.
    begins = folder is not None and not (folder / CONFIG_FILE).exists()
    arguments, attempt = list(command), 0
    while True:
        failure = launcher.run(flags, arguments)
        if failure is None:
            return 0
        say(f"{failure.reason}.")
        if failure.is_final or attempt == restarts:
            return failure.status
        if folder and begins and (folder / CONFIG_FILE).exists():
            arguments.append("--resume")
            begins = False
        attempt += 1
        say(f"restart {attempt} of {restarts}: python {shlex.join(arguments)}")


def check_restarts(restarts: int, folder: Path | None) -> None:
    """Refuses restarts of a command that has nothing to go on from.

    Raises:
      UsageError: They are less than none, or the command names no folder.
    """
    if restarts < 0:
        raise UsageError("--restarts must not be negative.")
    if restarts and folder is None:
        raise UsageError(
            "--restarts needs the run's folder to go on from; add --out FOLDER to the "
            "command."
        )


def run_folder_of(command: Sequence[str]) -> Path | None:
    """The folder that a command names by `--out`.

    Example:
      >>> from train.launch.command import run_folder_of
      >>> run_folder_of(["-m", "train.pretrain", "--out=runs/a"]).name
      'a'
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", nargs="?", type=Path)
    return parser.parse_known_args(command)[0].out


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence."""
    parser = launcher.make_parser(MODULE)
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        help="times to start all again after a failure, with --resume where "
        "the command has begun a run in its --out folder (default: %(default)s)",
    )
    try:
        given, command = launcher.parse(parser, sys.argv[1:])
        restarts = given.pop("restarts")
        raise SystemExit(launch(Launch(**given), restarts, command))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(USAGE_EXIT) from error
