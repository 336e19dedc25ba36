"""Processes that live and die together."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebit_launch.errors import LOST_EXIT, USAGE_EXIT
from onebit_launch.output import Relay, open_sinks, say

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_VICTIM = (-signal.SIGABRT, LOST_EXIT)
"""Exit statuses by which processes end because another one was lost: by JAX's client,
and by this application. Of failures at about the same time one of another status is
named the first."""
_SETTLE = 1.0
"""Seconds in which further processes may fail before one is named the first."""
_PATIENCE = 10.0
"""Seconds of silence after an exception before it is told that its process goes on."""
_DRAIN = 5.0
"""Seconds to wait for the last of the output after all processes have ended."""
_POLL = 0.05


@dataclass(frozen=True)
class Failure:
    """The end of processes of which not all succeeded.

    Attributes:
      reason: A sentence without its full stop.
      status: the exit status that a shell would tell.
      is_final: True where another attempt would end the same: after a signal to end,
        a command line that cannot be used, or a mistake that a sentence was said about.
    """

    reason: str
    status: int
    is_final: bool = False


def run_together(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    grace: float,
    first: int = 0,
    log_dir: Path | None = None,
    lookout: threading.Thread | None = None,
) -> Failure | None:
    """Runs a command in several processes until all are done or one fails.

    A signal that asks this process to end ends them all. None of the processes, nor of
    those in their sessions, is left when this returns; if this process is killed, the
    kernel kills the processes, though not those that they have started (on Linux).

    Args:
      command: the command.
      environments: variables of each process, beside this one's.
      grace: seconds between SIGTERM and SIGKILL.
      first: the number of the first among those of all hosts.
      log_dir: folder for the output, `0.log` and so on; None to print it.
      lookout: A thread to start once they run; it may outlive them.

    Returns:
      The failure; None if all ended with exit status 0.

    Raises:
      UsageError: The output's files cannot be made.
    """
    numbers = range(first, first + len(environments))
    processes: list[subprocess.Popen[bytes]] = []
    relays: list[list[Relay]] = []
    with open_sinks(numbers, log_dir) as sinks, _noted_signals() as signals:
        try:
            for environment in environments:
                processes.append(_start(command, environment, merged=bool(log_dir)))
            # Threads come last: a process that has some cannot be forked safely.
            for number, process, files in zip(numbers, processes, sinks, strict=True):
                pipes = filter(None, (process.stdout, process.stderr))
                prefix = "" if log_dir else f"[{number}] "
                both = zip(pipes, files, strict=True)
                relays.append([Relay(pipe, sink, prefix) for pipe, sink in both])
            if lookout:
                lookout.start()
            failed = _wait(processes, relays, signals, numbers)
            if signals:
                name = signal.Signals(signals[0]).name
                again = "; again to end them now" if signals[0] == signal.SIGINT else ""
                say(f"{name}: the processes are to end within {grace:g} s{again}.")
            running = [
                number
                for number, process in zip(numbers, processes, strict=True)
                if process.poll() is None
            ]
        finally:
            _end(processes, grace, signals)
            for relay in itertools.chain(*relays):
                relay.join(_DRAIN)
    if signals:
        name = signal.Signals(signals[0]).name
        return Failure(f"ended by {name}", 128 + signals[0], is_final=True)
    if not failed:
        return None

    def is_victim(place: int) -> bool:
        status = processes[place].returncode
        return status in _VICTIM and not relays[place][-1].is_exception

    at = min(failed, key=is_victim)
    status, stderr = processes[at].returncode, relays[at][-1]
    # Of signals, SIGABRT alone is what jax.distributed sends after an exception.
    tells_why = status >= 0 or (status == -signal.SIGABRT and stderr.is_exception)
    said = stderr.last_line if tells_why else ""
    return _failure(numbers[at], status, said, running)


def _start(
    command: Sequence[str], environment: Mapping[str, str], *, merged: bool
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env={"PYTHONUNBUFFERED": "1", **os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_die_with_parent(),
    )


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    relays: Sequence[Sequence[Relay]],
    signals: Sequence[int],
    numbers: Sequence[int],
) -> list[int]:
    """Waits for the end of all, a signal, or a failure and those that follow it.

    Tells of each process that goes on in silence after an exception.

    Returns:
      Places in `processes` of those that failed, in the order in which they were seen.
    """
    failed: list[int] = []
    told: set[int] = set()
    deadline = None
    while not signals and (deadline is None or time.monotonic() < deadline):
        statuses = [process.poll() for process in processes]
        failed += [i for i, s in enumerate(statuses) if s and i not in failed]
        if None not in statuses:
            break
        if failed and deadline is None:
            deadline = time.monotonic() + _SETTLE
        for place, streams in enumerate(relays):
            runs = statuses[place] is None and place not in told
            if runs and _is_silent_after_exception(streams):
                told.add(place)
                said = streams[-1].last_line.rstrip(".")
                say(
                    f"process {numbers[place]} has gone on in silence after {said}: if "
                    "that ended it, it waits for the others, by jax.distributed's "
                    "default for 5 minutes; Ctrl-C ends all."
                )
        time.sleep(_POLL)
    return failed


def _is_silent_after_exception(streams: Sequence[Relay]) -> bool:
    since = max(stream.silent_since for stream in streams)
    return streams[-1].is_exception and time.monotonic() - since > _PATIENCE


def _failure(first: int, status: int, said: str, running: Sequence[int]) -> Failure:
    """The failure of a process.

    Args:
      first: its number.
      status: its exit status; if a signal killed it, minus the signal's number.
      said: the last line with a letter of its standard error; '' if it does not tell
        why.
      running: numbers of the processes that ran on.
    """
    is_victim = status in _VICTIM and running
    what = "ended, as another was lost or hangs" if is_victim else "failed first"
    if status < 0:
        names = {each.value: each.name for each in signal.Signals}
        by = names.get(-status, f"signal {-status}")  # real-time ones have no name
        reason = f"process {first} {what}, killed by {by}"
        if status == -signal.SIGKILL:
            reason += ", as a system sends when memory runs out"
    else:
        reason = f"process {first} {what}, with exit status {status}"
    if said:
        reason += f": {said.rstrip('.')}"
    if running:
        reason += f"; still running then: process {', '.join(map(str, running))}"
    is_mistake = status == USAGE_EXIT or (
        status != LOST_EXIT and said.startswith("error: ")
    )
    return Failure(reason, 128 - status if status < 0 else status, is_mistake)


def _end(
    processes: Sequence[subprocess.Popen[bytes]], grace: float, noted: Sequence[int]
) -> None:
    """Ends all processes and those that they have started, at a second SIGINT now."""
    for sent in ((signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):
        for process, number in itertools.product(processes, sent):
            # Its session may be gone.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + grace
        while any(map(_is_alive, processes)) and time.monotonic() < deadline:
            if noted.count(signal.SIGINT) > 1:
                break
            time.sleep(_POLL)
    for process in processes:
        process.wait()


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    """True while a process, or one of its session, runs."""
    if process.poll() is None:
        return True
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """A list that notes signals that ask to end, instead of ending.

    What is ignored from the start stays so, as after `nohup` or a shell's `&`.
    """
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: noted.append(number))
        for number in _ENDING
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_parent() -> Callable[[], None] | None:
    """A child's first act: on Linux, to be killed when its parent is."""
    if not sys.platform.startswith("linux"):
        return None
    libc, parent, set_death_signal = ctypes.CDLL(None), os.getpid(), 1

    def prepare() -> None:
        libc.prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
