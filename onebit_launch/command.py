"""`onebit-launch --processes 4 -- train.py …`: several processes of a Python command.

Starts the command several times on this host, and on others where it is called there
too, each process told its place by its environment, so that
`jax.distributed.initialize()` needs no argument. When one fails, the others of this
host are ended and the first failure is named. None of them outlives the launcher, on
Linux not even one that is killed. It needs Python alone, and does not import JAX.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebit_launch.environment import (
    environments,
    free_port,
    why_taken,
    why_unfound,
)
from onebit_launch.errors import USAGE_EXIT, UsageError
from onebit_launch.lookout import Lookout
from onebit_launch.output import say
from onebit_launch.processes import Failure, run_together

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Launch:
    """The flags.

    Attributes:
      processes: processes to start on this host.
      devices_per_process: devices of each.
      hosts: hosts on which the launcher is called.
      host: the number of this one.
      coordinator: HOST:PORT of process 0; None for a free port of the only host.
      log_dir: folder for a file of output for each process; None to print it.
      grace: seconds between asking processes to end and ending them.
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
      program: the name of the command.
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
        help="hosts on which this command is called, each with its own --host "
        "(default: 1)",
    )
    add("--host", type=int, help="number of this host, from 0; needed with --hosts")
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="an address of host 0 that all hosts reach; needed with --hosts",
    )
    add(
        "--log-dir",
        type=Path,
        help="folder for a file of output for each process, which goes on where it is "
        "there; default: all is printed, each line after the number of its process",
    )
    add(
        "--grace",
        type=float,
        default=10.0,
        help="seconds between asking processes to end (SIGTERM) and ending them "
        "(SIGKILL) (default: %(default)s)",
    )
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The values of the launcher's own flags, and the command after `--`.

    Args:
      parser: the parser of the flags.
      arguments: all arguments.

    Raises:
      UsageError: There is something else before `--`, as where it is forgotten,
        there are several hosts and no number of this one, or a coordinator or this
        host's number is given without the number of hosts.

    Example:
      >>> parser = make_parser('onebit-launch')
      >>> flags, command = parse(parser, ['--processes', '2', '--', 'a.py', '--', 'x'])
      >>> flags['processes'], command
      (2, ['a.py', '--', 'x'])
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags, others = parser.parse_known_args(arguments[:end])
    if others:
        raise UsageError(
            f"{others[0]} is no flag of the launcher; write the command and its flags "
            f"after --, as in {parser.prog} --processes 2 -- train.py."
        )
    if flags.hosts is None and (flags.coordinator, flags.host) != (None, None):
        raise UsageError(
            "--coordinator and --host need --hosts, or this host would train alone; "
            "for one host leave them out."
        )
    flags.hosts = 1 if flags.hosts is None else flags.hosts
    if flags.host is None and flags.hosts > 1:
        raise UsageError("--hosts needs --host, another number on each host, from 0.")
    flags.host = flags.host or 0
    return vars(flags), list(arguments[end + 1 :])


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
        _check_address(flags.coordinator, is_here=flags.host == 0)
    if not flags.grace >= 0:
        raise UsageError("--grace must not be negative.")
    if not command:
        raise UsageError("there is no command; give one after --, such as -- train.py.")
    if re.fullmatch(r"python[\d.]*", Path(command[0]).name):
        raise UsageError(
            f"the launcher starts the Python that it runs in by itself; leave out "
            f"{command[0]} and write -- {shlex.join(command[1:])}"
        )


def _check_address(coordinator: str, *, is_here: bool) -> None:
    """Refuses a coordinator's address that is none, or that this host cannot give."""
    name, _, port = coordinator.rpartition(":")
    if not (name and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UsageError(
            f"--coordinator {coordinator} is not an address; give HOST:PORT, the port "
            "from 1 to 65535."
        )
    if is_here and (reason := why_taken(int(port))):
        raise UsageError(
            f"the processes of --host 0 cannot listen on port {port} here ({reason}); "
            "give each launcher a --host of its own, or another port in all of them."
        )


def run(flags: Launch, command: Sequence[str]) -> Failure | None:
    """Runs a command in several processes.

    Args:
      flags: the flags.
      command: arguments of Python: a script or `-m module`, and its flags.

    Returns:
      The first failure; None if all processes succeeded.

    Raises:
      UsageError: The files of output cannot be made.
    """
    port = free_port()
    lookout = advice = None
    if flags.hosts > 1 and flags.coordinator:
        lookout = Lookout(flags.coordinator)
        advice = _say_start(flags, flags.coordinator)
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
        lookout=lookout,
    )
    if failure and flags.hosts > 1 and not failure.is_final:
        if advice:  # what was said long ago may be why
            say(advice)
        there = "on this host; the launchers of the others tell what was first there"
        return replace(failure, reason=f"{failure.reason} ({there})")
    if (
        failure
        and not flags.coordinator
        and f"listen on port {port} " in failure.reason
    ):
        # Another program was faster; the next attempt takes another port.
        return replace(failure, is_final=False)
    return failure


def _say_start(flags: Launch, coordinator: str) -> str | None:
    """Says what one host of several starts.

    Returns:
      Advice about the host's name, said as well; None where it needs none.
    """
    say(
        f"host {flags.host} of hosts 0 to {flags.hosts - 1} starts its "
        f"{flags.processes} of all {flags.hosts * flags.processes} processes, "
        f"which wait in silence for the others at {coordinator}."
    )
    reason = why_unfound(coordinator)
    if reason is None:
        return None
    advice = (
        f"{reason}: give that name its address in /etc/hosts here, as processes on "
        "CPUs look it up to find each other."
    )
    say(advice)
    return advice


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence.

    The exit status is that of the process that failed first; 128 and the signal's
    number if it ended by one; 2 for a mistake.
    """
    try:
        given, command = parse(make_parser("onebit-launch"), sys.argv[1:])
        flags = Launch(**given)
        check(flags, command)
        failure = run(flags, command)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(USAGE_EXIT) from error
    if failure is not None:
        say(f"{failure.reason}.")
        raise SystemExit(failure.status)
