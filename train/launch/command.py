"""`python -m train.launch --processes 4 -- -m train.pretrain …`: several processes.

Starts the same Python command several times on this machine, each process told by its
environment (`JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`) where it
stands, and by `TRAIN_RESTART_COUNT` how often all were started again. When one fails,
the others are ended and the first failure is named. None of them outlives the
launcher, however that ends.
"""

from __future__ import annotations

import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from train.core.errors import InputError
from train.launch.output import Output
from train.launch.processes import run_group

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIG_FILE = "config.json"
"""What a run's folder holds as soon as `--resume` can go on with it."""


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
    """How often to start all again after a failure, but for one that says in a
    sentence what to mend."""
    log_dir: Path | None = None
    """Folder for a file of output for each process; default: all is printed, each
    line after the number of its process."""
    grace: float = 10.0
    """Seconds between asking processes to end (SIGTERM) and ending them (SIGKILL)."""


def launch(flags: Launch, command: Sequence[str]) -> int:
    """Runs a command in several processes, again after failures where asked to.

    Args:
      flags: The flags.
      command: What Python is to run: `-m module` or a script, and its flags.

    Returns:
      0, or the exit status of the process that failed first in the last attempt,
      128 and the signal's number if it ended by one.

    Raises:
      InputError: The flags cannot be used.
    """
    check(flags, command)
    status = 0
    for attempt in range(flags.restarts + 1):
        arguments = list(command)
        if attempt:
            folder = run_folder_of(command)
            begun = folder is not None and (folder / CONFIG_FILE).exists()
            if begun and "--resume" not in arguments:
                arguments.append("--resume")
            say(
                f"restart {attempt} of {flags.restarts}: python {shlex.join(arguments)}"
            )
        with Output(flags.log_dir, append=attempt > 0) as output:
            failure = run_group(
                [sys.executable, *arguments],
                environments(
                    flags.processes, flags.devices_per_process, free_port(), attempt
                ),
                output,
                flags.grace,
            )
        if failure is None:
            return 0
        status = failure.status
        say(f"{failure.reason}.")
        if failure.lasting:
            break
    return status


def check(flags: Launch, command: Sequence[str]) -> None:
    """Refuses flags that cannot be used.

    Raises:
      InputError: What is wrong with them.
    """
    for name in ("processes", "devices_per_process"):
        if getattr(flags, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1.")
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
    for argument, following in zip(command, [*command[1:], None], strict=True):
        if argument == "--out" and following is not None:
            return Path(following)
        if argument.startswith("--out="):
            return Path(argument.removeprefix("--out="))
    return None


def environments(
    processes: int, devices: int, port: int, restarts: int = 0
) -> list[dict[str, str]]:
    """What each process's environment has beside the launcher's own.

    Args:
      processes: Their number.
      devices: Devices of each.
      port: Where process 0 is to listen.
      restarts: How often they have been started again.

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
            "TRAIN_RESTART_COUNT": str(restarts),
            "JAX_LOCAL_DEVICE_IDS": ",".join(
                str(process * devices + device) for device in range(devices)
            ),
        }
        for process in range(processes)
    ]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def say(text: str) -> None:
    """Prints a line of the launcher's own."""
    print(f"[launch] {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence."""
    own, command = _split(sys.argv[1:])
    flags = tyro.cli(Launch, args=own, prog="python -m train.launch")
    try:
        raise SystemExit(launch(flags, command))
    except InputError as error:
        raise SystemExit(f"error: {error}") from error


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The launcher's own flags, and the command after --."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]
