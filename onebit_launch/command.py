"""`onebit-launch --processes 4 -- train.py …`: several processes of a Python command.

Starts the command several times on this host, and on others where it is called there
too, each process told its place by its environment, so that
`jax.distributed.initialize()` needs no argument. When one fails, the others of this
host are ended and the first failure is named. None of them outlives the launcher,
however that ends. It needs Python alone, and does not import JAX.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onebit_launch.environment import environments, free_port
from onebit_launch.errors import UsageError
from onebit_launch.output import say
from onebit_launch.processes import Failure, run_together

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Launch:
    """The flags.

    Attributes:
      processes: Processes to start on this host.
      devices_per_process: Devices of each.
      hosts: Hosts on which the launcher is called.
      host: The number of this one.
      coordinator: HOST:PORT of process 0; None for a free port of the only host.
      log_dir: Folder for a file of output for each process; None to print it.
      grace: Seconds between asking processes to end and ending them.
    """

    processes: int
    devices_per_process: int = 1
    hosts: int = 1
    host: int = 0
    coordinator: str | None = None
    log_dir: Path | None = None
    grace: float = 10.0


def make_parser(program: str) -> argparse.ArgumentParser:
    """The parser of the flags of `Launch`.

    Args:
      program: The name of the command.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} --processes N [options] -- COMMAND",
        description="Starts several processes of a Python command, given after --: a "
        "script or -m module, and its own flags. In each of them "
        "jax.distributed.initialize() finds the others.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--processes", type=int, required=True, help="processes to start on this host")
    add(
        "--devices-per-process",
        type=int,
        default=1,
        help="devices of each: GPUs of its own, or virtual devices on a CPU (default: "
        "%(default)s)",
    )
    add(
        "--hosts",
        type=int,
        default=1,
        help="hosts on which this command is called, each with its own --host "
        "(default: %(default)s)",
    )
    add("--host", type=int, default=0, help="number of this host, from 0")
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="an address of host 0 that all hosts reach; needed with --hosts",
    )
    add(
        "--log-dir",
        type=Path,
        help="folder for a file of output for each process; default: all is printed, "
        "each line after the number of its process",
    )
    add(
        "--grace",
        type=float,
        default=10.0,
        help="seconds between asking processes to end (SIGTERM) and ending them "
        "(SIGKILL) (default: %(default)s)",
    )
    return parser


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's own arguments, and the command after `--`.

    Example:
      >>> split(['--processes', '2', '--', 'train.py', '--', 'x'])
      (['--processes', '2'], ['train.py', '--', 'x'])
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


def check(flags: Launch, command: Sequence[str]) -> None:
    """Refuses flags that cannot be used.

    Raises:
      UsageError: One cannot be used.
    """
    if min(flags.processes, flags.devices_per_process, flags.hosts) < 1:
        raise UsageError(
            "--processes, --devices-per-process and --hosts must be at least 1."
        )
    if not 0 <= flags.host < flags.hosts:
        raise UsageError(
            f"--host {flags.host} must be from 0 to {flags.hosts - 1}, one less than "
            "--hosts."
        )
    if flags.hosts > 1 and flags.coordinator is None:
        raise UsageError(
            "--hosts needs --coordinator HOST:PORT, an address of host 0 and a port "
            "that is free there, the same on all hosts."
        )
    if flags.coordinator is not None:
        name, _, port = flags.coordinator.rpartition(":")
        if not (name and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise UsageError(
                f"--coordinator {flags.coordinator} is not an address; give HOST:PORT, "
                "the port from 1 to 65535."
            )
    if not flags.grace >= 0:
        raise UsageError("--grace must not be negative.")
    if not command:
        raise UsageError("there is no command; give one after --, such as -- train.py.")


def run(
    flags: Launch, command: Sequence[str], *, append: bool = False
) -> Failure | None:
    """Runs a command in several processes.

    Args:
      flags: The flags.
      command: Arguments of Python: a script or `-m module`, and its flags.
      append: True to go on in files of output that are there.

    Returns:
      The first failure; None if all processes succeeded.

    Raises:
      UsageError: The files of output cannot be made.
    """
    port = free_port()
    failure = run_together(
        [sys.executable, *command],
        environments(
            flags.processes,
            flags.devices_per_process,
            flags.coordinator or f"127.0.0.1:{port}",
            hosts=flags.hosts,
            host=flags.host,
        ),
        first=flags.host * flags.processes,
        grace=flags.grace,
        log_dir=flags.log_dir,
        append=append,
    )
    if (
        failure
        and not flags.coordinator
        and f"listen on port {port} " in failure.reason
    ):
        # Another program was faster; the next attempt takes another port.
        return replace(failure, is_final=False)
    return failure


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence.

    The exit status is that of the process that failed first; 128 and the signal's
    number if it ended by one.
    """
    own, command = split(sys.argv[1:])
    flags = Launch(**vars(make_parser("onebit-launch").parse_args(own)))
    try:
        check(flags, command)
        failure = run(flags, command)
    except UsageError as error:
        raise SystemExit(f"error: {error}") from error
    if failure is not None:
        say(f"{failure.reason}.")
        raise SystemExit(failure.status)
