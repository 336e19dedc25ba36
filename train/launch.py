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
from onebit_launch.output import say

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIG_FILE = "config.json"
"""A file of a run's folder: where it is, `--resume` can go on."""


def run_folder_of(command: Sequence[str]) -> Path | None:
    """The folder that a command names by `--out`.

    Example:
      >>> from train.launch import run_folder_of
      >>> run_folder_of(["-m", "train.pretrain", "--out=runs/a"]).name
      'a'
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", nargs="?", type=Path)
    return parser.parse_known_args(command)[0].out


def launch(
    flags: argparse.Namespace, command: Sequence[str], folder: Path | None
) -> int:
    """Runs a command in several processes, again after failures where asked to.

    Not after one that another attempt would repeat: a mistake on the command line, or
    one that the command says in a sentence how to mend.

    Args:
      flags: The flags, `restarts` among them.
      command: Arguments of Python: `-m module` or a script, and its flags.
      folder: The run's folder.

    Returns:
      The exit status of the last attempt.
    """
    # A run that was there before is not this command's to go on with.
    begins = folder is not None and not (folder / CONFIG_FILE).exists()
    arguments, attempt = list(command), 0
    while failure := launcher.run(flags, arguments):
        say(f"{failure.reason}.")
        if failure.is_final or attempt == flags.restarts:
            return failure.status
        if folder and begins and (folder / CONFIG_FILE).exists():
            arguments.append("--resume")
            begins = False
        attempt += 1
        say(f"restart {attempt} of {flags.restarts}: python {shlex.join(arguments)}")
    return 0


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence."""
    parser = launcher.Parser("python -m train.launch")
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        help="times to start all again after a failure, with --resume where "
        "the command has begun a run in its --out folder (default: %(default)s)",
    )
    flags, command = parser.flags_and_command(sys.argv[1:])
    folder = run_folder_of(command)
    if flags.restarts < 0:
        parser.error("--restarts must not be negative.")
    if flags.restarts and folder is None:
        parser.error(
            "--restarts needs the run's folder to go on from; add --out FOLDER to the "
            "command."
        )
    raise SystemExit(launch(flags, command, folder))


if __name__ == "__main__":
    main()
