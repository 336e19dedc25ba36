"""`onebit-launch --processes 4 -- train.py …`: several processes of a Python command.

Starts the command several times on this host, and on others where it is called there
too, each process told its place by its environment, so that
`jax.distributed.initialize()` needs no argument. When one fails, the others of this
host are ended and the first failure is named. None of them outlives the launcher, on
Linux not even one that is killed. It needs Python alone, and does not import JAX.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from onebit_launch.environment import (
    environments,
    free_port,
    tell_of_silence,
    why_taken,
    why_unfound,
)
from onebit_launch.errors import USAGE_EXIT
from onebit_launch.output import say
from onebit_launch.processes import Failure, run_together

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Parser(argparse.ArgumentParser):
    """A parser of the launcher's flags, which refuses others in one sentence.

    Args:
      program: the name of the command.
    """

    def __init__(self, program: str):
        super().__init__(
            prog=program,
            usage=f"{program} --processes N [options] -- COMMAND",
            description="Starts several processes of a Python command, given after "
            "--: a script or -m module, and its own flags. In each of them "
            "jax.distributed.initialize() finds the others.",
            allow_abbrev=False,
        )
        add = self.add_argument
        add(
            "--processes",
            type=int,
            required=True,
            help="processes to start on this host",
        )
        add(
            "--devices-per-process",
            type=int,
            default=1,
            help="devices of each: GPUs of its own, or virtual devices on a CPU "
            "(default: %(default)s)",
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
            help="folder for a file of output for each process, which goes on where it "
            "is there; default: all is printed, each line after the number of its "
            "process",
        )
        add(
            "--grace",
            type=float,
            default=10.0,
            help="seconds between asking processes to end (SIGTERM) and ending them "
            "(SIGKILL) (default: %(default)s)",
        )

    def error(self, message: str) -> NoReturn:
        """Ends the launcher, as a command line that cannot be used does."""
        self.exit(USAGE_EXIT, f"error: {message}\n")

    def flags_and_command(
        self, arguments: Sequence[str]
    ) -> tuple[argparse.Namespace, list[str]]:
        """The values of the flags, all of them checked, and the command after `--`.

        Example:
          >>> flags, command = Parser('onebit-launch').flags_and_command(
          ...     ['--processes', '2', '--', 'a.py', '--', 'x'])
          >>> flags.processes, command
          (2, ['a.py', '--', 'x'])
        """
        end = arguments.index("--") if "--" in arguments else len(arguments)
        command = list(arguments[end + 1 :])
        flags, others = self.parse_known_args(arguments[:end])
        if others:
            self.error(
                f"{others[0]} is no flag of the launcher; write the command and its "
                f"flags after --, as in {self.prog} --processes 2 -- train.py."
            )
        mistakes = itertools.chain(_mistakes_of_hosts(flags), _mistakes(flags, command))
        if mistake := next(mistakes, None):
            self.error(mistake)
        return flags, command


def _mistakes_of_hosts(flags: argparse.Namespace) -> Iterator[str]:
    """The mistakes in the flags of hosts, to which it gives their defaults."""
    if flags.hosts is None and (flags.coordinator, flags.host) != (None, None):
        yield (
            "--coordinator and --host need --hosts, or this host would train alone; "
            "for one host leave them out."
        )
    flags.hosts = 1 if flags.hosts is None else flags.hosts
    if flags.host is None and flags.hosts > 1:
        yield "--hosts needs --host, another number on each host, from 0."
    flags.host = flags.host or 0
    if min(flags.processes, flags.devices_per_process, flags.hosts) < 1:
        yield "--processes, --devices-per-process and --hosts must be at least 1."
    if not 0 <= flags.host < flags.hosts:
        yield (
            f"--host {flags.host} must be from 0 to {flags.hosts - 1}, one less than "
            "--hosts."
        )
    if flags.hosts > 1 and flags.coordinator is None:
        yield (
            "--hosts needs --coordinator HOST:PORT, an address of host 0 and a port "
            "that is free there, the same on all hosts."
        )
    if flags.coordinator is None:
        return
    name, _, port = flags.coordinator.rpartition(":")
    if not (name and port.isdecimal() and 0 < int(port) < 1 << 16):
        yield (
            f"--coordinator {flags.coordinator} is not an address; give HOST:PORT, "
            "the port from 1 to 65535."
        )
    if flags.host == 0 and (reason := why_taken(int(port))):
        yield (
            f"the processes of --host 0 cannot listen on port {port} here ({reason}); "
            "give each launcher a --host of its own, or another port in all of them."
        )


def _mistakes(flags: argparse.Namespace, command: Sequence[str]) -> Iterator[str]:
    """The other mistakes."""
    if not command:
        yield "there is no command; give one after --, such as -- train.py."
    if re.fullmatch(r"python[\d.]*", Path(command[0]).name):
        yield (
            f"the launcher starts the Python that it runs in by itself; leave out "
            f"{command[0]} and write -- {shlex.join(command[1:])}"
        )
    if flags.log_dir is None:
        return
    try:
        flags.log_dir.mkdir(parents=True, exist_ok=True)
        for number in _numbers(flags):
            (flags.log_dir / f"{number}.log").open("ab").close()
    except OSError as error:
        yield (
            f"--log-dir {flags.log_dir} cannot be written to ({error.strerror}); give "
            "another."
        )


def _numbers(flags: argparse.Namespace) -> range:
    """The numbers of this host's processes among all."""
    first = flags.host * flags.processes
    return range(first, first + flags.processes)


def run(flags: argparse.Namespace, command: Sequence[str]) -> Failure | None:
    """Runs a command in several processes.

    Args:
      flags: the flags.
      command: arguments of Python: a script or `-m module`, and its flags.

    Returns:
      The first failure; None if all processes succeeded.
    """
    coordinator = flags.coordinator or f"127.0.0.1:{free_port()}"
    lookout = advice = None
    if flags.hosts > 1:
        lookout = threading.Thread(
            target=tell_of_silence, args=(coordinator,), daemon=True
        )
        say(
            f"host {flags.host} of hosts 0 to {flags.hosts - 1} starts its "
            f"{flags.processes} of all {flags.hosts * flags.processes} processes, "
            f"which wait in silence for the others at {coordinator}."
        )
        advice = why_unfound(coordinator)
    if advice:
        say(advice)
    failure = run_together(
        [sys.executable, *command],
        environments(
            flags.processes,
            flags.devices_per_process,
            coordinator,
            hosts=flags.hosts,
            host=flags.host,
        ),
        first=_numbers(flags).start,
        grace=flags.grace,
        log_dir=flags.log_dir,
        lookout=lookout,
    )
    if failure and flags.hosts > 1 and not failure.is_final:
        if advice:  # what was said long ago may be why
            say(advice)
        there = "on this host; the launchers of the others tell what was first there"
        return replace(failure, reason=f"{failure.reason} ({there})")
    return failure


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence.

    The exit status is that of the process that failed first; 128 and the signal's
    number if it ended by one; 2 for a mistake.
    """
    flags, command = Parser("onebit-launch").flags_and_command(sys.argv[1:])
    failure = run(flags, command)
    if failure is not None:
        say(f"{failure.reason}.")
        raise SystemExit(failure.status)
