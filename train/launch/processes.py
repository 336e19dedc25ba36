"""Processes that live and die together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from train.core.errors import LOST_EXIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from train.launch.output import Output

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SETTLE = 1.0
"""Seconds in which further processes may fail before one is named the first."""
_POLL = 0.05


@dataclass(frozen=True)
class Failure:
    """Why a group ended.

    Attributes:
      reason: A sentence without its full stop.
      status: The exit status that a shell would tell.
      lasting: Whether another attempt would end the same: it was ended from outside,
        or by a mistake that a sentence was said about.
    """

    reason: str
    status: int
    lasting: bool = False


def run_group(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    output: Output,
    grace: float,
) -> Failure | None:
    """Runs a command in several processes until all are done or one fails.

    A signal that asks this process to end is passed on. None of the processes, nor of
    those in their sessions, is left when this returns; if this process is killed, the
    kernel kills the processes, though not what they have started (on Linux).

    Args:
      command: The command.
      environments: What each process's environment has beside this one's.
      output: What takes their output.
      grace: Seconds between SIGTERM and SIGKILL.

    Returns:
      The failure; None if all ended with exit status 0.
    """
    started: list[subprocess.Popen[bytes]] = []
    with _signals_noted() as noted:
        try:
            for process, environment in enumerate(environments):
                with output.targets(process) as (stdout, stderr):
                    started.append(_start(command, environment, stdout, stderr))
                output.relay(process, started[-1])
            return _wait(started, output, noted)
        finally:
            _end(started, output, grace)


def _start(command, environment, stdout, stderr) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env={"PYTHONUNBUFFERED": "1", **os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=_die_with_parent(),
    )


def _wait(
    started: Sequence[subprocess.Popen[bytes]], output: Output, noted: list[int]
) -> Failure | None:
    failed: list[int] = []
    deadline = None
    while deadline is None or time.monotonic() < deadline:
        output.pump(_POLL)
        if noted:
            name = signal.Signals(noted[0]).name
            return Failure(f"ended by {name}", 128 + noted[0], lasting=True)
        states = [process.poll() for process in started]
        failed += [i for i, s in enumerate(states) if s and i not in failed]
        if failed and deadline is None:
            deadline = time.monotonic() + _SETTLE
        if None not in states:
            break
    if not failed:
        return None
    output.pump(0)
    return _failure(started, failed, output)


def _failure(
    started: Sequence[subprocess.Popen[bytes]], failed: Sequence[int], output: Output
) -> Failure:
    # Those that end because another is lost are seen as soon as that one.
    consequences = [
        i
        for i in failed
        if started[i].returncode == LOST_EXIT
        or (started[i].returncode == -signal.SIGABRT and output.tells_of_loss(i))
    ]
    first = min(failed, key=lambda i: i in consequences)
    status = started[first].returncode
    verb = "gave up waiting" if first in consequences else "failed first"
    reason = f"process {first} {verb}, {_spell(status)}"
    cause = output.cause(first)
    if status != -signal.SIGKILL and cause:
        reason += f": {cause.rstrip('.')}"
    left = [i for i, process in enumerate(started) if process.returncode is None]
    if left:
        states = [f"process {i}{_state(started[i].pid)}" for i in left]
        reason += f"; still running then: {', '.join(states)}"
    mistaken = first not in consequences and cause.startswith("error: ")
    return Failure(reason, 128 - status if status < 0 else status, lasting=mistaken)


def _spell(status: int) -> str:
    if status >= 0:
        return f"with exit status {status}"
    hint = ", as a system sends when memory runs out" if status == -9 else ""
    return f"killed by {signal.Signals(-status).name}{hint}"


def _state(pid: int) -> str:
    """Whether a process is stopped, on Linux."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] in "Tt":
            return " (stopped)"
    return ""


def _end(
    started: Sequence[subprocess.Popen[bytes]], output: Output, grace: float
) -> None:
    """Ends all processes and what they have started."""
    for signals in ((signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):
        for process in started:
            for number in signals:
                # Its session may be gone.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        deadline = time.monotonic() + grace
        while any(map(_is_left, started)) and time.monotonic() < deadline:
            output.pump(_POLL)
    for process in started:
        process.wait()
    output.pump(0)


def _is_left(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process, or one of its session, still runs."""
    if process.poll() is None:
        return True
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Notes signals that ask to end, instead of ending."""
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: noted.append(number))
        for number in _ENDING
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_parent() -> Callable[[], None] | None:
    """What a child runs first, so that it does not outlive a parent that is killed."""
    if not sys.platform.startswith("linux"):
        return None
    libc, parent, set_death_signal = ctypes.CDLL(None), os.getpid(), 1

    def prepare() -> None:
        libc.prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
