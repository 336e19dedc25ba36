"""`python -m train.launch --processes 4 -- -m train.pretrain …`: several processes.

Starts the same Python command several times on this machine, each process told by its
environment (`JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`) its place
among them. When one fails, the others are ended and the first failure is named. None of
them outlives the launcher, however that ends.
"""

from __future__ import annotations

import argparse
import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from train.core.errors import InputError
from train.launch.processes import run_together

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIG_FILE = "config.json"
"""A file of a run's folder: where it is, `--resume` can go on."""


@dataclass(frozen=True)
class Launch:
    """Starts several processes of one Python command, given after --, on this machine.

    With --restarts, a command with --out FOLDER is started again with --resume added
    where FOLDER holds a run, else as it was.
    """

    processes: int
    """Processes to start."""
    devices_per_process: int = 1
    """Devices of each: GPUs of its own, or virtual devices on a CPU."""
    restarts: int = 0
    """Times to start all again after a failure, but for one that says in a sentence
    what to mend."""
    log_dir: Path | None = None
    """Folder for a file of output for each process; default: all is printed, each
    line after the number of its process."""
    grace: float = 10.0
    """Seconds between asking processes to end (SIGTERM) and ending them (SIGKILL)."""


def launch(flags: Launch, command: Sequence[str]) -> int:
    """Runs a command in several processes, again after failures where asked to.

    Args:
      flags: The flags.
      command: Arguments of Python: `-m module` or a script, and its flags.

    Returns:
      0, or the exit status of the process that failed first in the last attempt,
      128 and the signal's number if it ended by one.

    Raises:
      InputError: The flags cannot be used.
    """
    check(flags, command)
    arguments, attempt = list(command), 0
    while True:
        failure = run_together(
            [sys.executable, *arguments],
            environments(flags.processes, flags.devices_per_process, free_port()),
            grace=flags.grace,
            log_dir=flags.log_dir,
            append=attempt > 0,
        )
        if failure is None:
            return 0
        say(f"{failure.reason}.")
        if failure.is_final or attempt == flags.restarts:
            return failure.status
        folder = run_folder_of(command)
        if folder and (folder / CONFIG_FILE).exists() and "--resume" not in arguments:
            arguments.append("--resume")
        attempt += 1
        say(f"restart {attempt} of {flags.restarts}: python {shlex.join(arguments)}")


def check(flags: Launch, command: Sequence[str]) -> None:
    """Refuses flags that cannot be used.

    Raises:
      InputError: One cannot be used.
    """
    if flags.processes < 1 or flags.devices_per_process < 1:
        raise InputError("--processes and --devices-per-process must be at least 1.")
    if flags.restarts < 0 or not flags.grace >= 0:
        raise InputError("--restarts and --grace must not be negative.")
    if not command:
        raise InputError(
            "there is no command; give one after --, such as -- -m train.pretrain."
        )
    if flags.restarts and run_folder_of(command) is None:
        raise InputError(
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


def environments(processes: int, devices: int, port: int) -> list[dict[str, str]]:
    """Variables of each process's environment, beside the launcher's own.

    Args:
      processes: Their number.
      devices: Devices of each.
      port: The port on which process 0 is to listen.

    Returns:
      The variables of each process.
    """
    return [
        {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(process),
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_LOCAL_DEVICE_IDS": ",".join(
                str(process * devices + device) for device in range(devices)
            ),
        }
        for process in range(processes)
    ]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def say(text: str) -> None:
    """Prints a line of the launcher's own."""
    print(f"[launch] {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = tyro.cli(Launch, args=arguments[:end], prog="python -m train.launch")
    try:
        raise SystemExit(launch(flags, arguments[end + 1 :]))
    except InputError as error:
        raise SystemExit(f"error: {error}") from error
