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
from typing import IO, TYPE_CHECKING

from onebit_launch.errors import LOST_EXIT, USAGE_EXIT
from onebit_launch.output import Relay, say

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
      reason: a sentence without its full stop.
      status: the exit status that a shell would tell.
      is_final: True where another attempt would end the same: after a signal to end,
        a command line that cannot be used, or a mistake that a sentence was said about.
    """

    reason: str
    status: int
    is_final: bool = False


class _Process:
    """A process in a session of its own, and what passes its output on."""

    def __init__(
        self, number: int, command: Sequence[str], environment: Mapping[str, str]
    ):
        self.number = number
        self.popen = subprocess.Popen(
            command,
            env={"PYTHONUNBUFFERED": "1", **os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )

    def relay(self, log: IO[bytes] | None) -> None:
        """Passes its output on to a file, or under its number to this process's own."""
        prefix = "" if log else f"[{self.number}] "
        assert self.popen.stdout
        assert self.popen.stderr
        self.out = Relay(self.popen.stdout, log or sys.stdout.buffer, prefix)
        self.err = Relay(self.popen.stderr, log or sys.stderr.buffer, prefix)

    def is_victim(self) -> bool:
        return self.popen.returncode in _VICTIM and not self.err.is_exception

    def is_silent_after_exception(self) -> bool:
        since = max(self.out.silent_since, self.err.silent_since)
        return self.err.is_exception and time.monotonic() - since > _PATIENCE

    def send(self, number: int) -> bool:
        """Sends its session a signal; False if nothing of it runs."""
        self.popen.poll()
        try:
            os.killpg(self.popen.pid, number)
        except ProcessLookupError:
            return False
        return True


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
      lookout: a thread to start once they run; it may outlive them.

    Returns:
      The failure; None if all ended with exit status 0.
    """
    processes: list[_Process] = []
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_noted_signals())
        try:
            for number, environment in enumerate(environments, first):
                processes.append(_Process(number, command, environment))
            # Threads come last: a process that has some cannot be forked safely.
            for process in processes:
                log = log_dir and (log_dir / f"{process.number}.log").open("ab")
                process.relay(log and stack.enter_context(log))
            if lookout:
                lookout.start()
            failed = _wait(processes, signals)
            running = [p.number for p in processes if p.popen.poll() is None]
            if signals:
                name = signal.Signals(signals[0]).name
                again = "; again to end them now" if signals[0] == signal.SIGINT else ""
                say(f"{name}: the processes are to end within {grace:g} s{again}.")
        finally:
            _end(processes, grace, signals)
        for process in processes:
            process.out.join(_DRAIN)
            process.err.join(_DRAIN)
    if signals:
        name = signal.Signals(signals[0]).name
        return Failure(f"ended by {name}", 128 + signals[0], is_final=True)
    return _failure(min(failed, key=_Process.is_victim), running) if failed else None


def _wait(processes: Sequence[_Process], signals: Sequence[int]) -> list[_Process]:
    """Waits for the end of all, a signal, or a failure and those that follow it.

    Tells of each process that goes on in silence after an exception.

    Returns:
      The processes that failed, in the order in which it was seen.
    """
    failed: list[_Process] = []
    silent: list[_Process] = []
    deadline = float("inf")
    while not signals and time.monotonic() < deadline:
        running = [p for p in processes if p.popen.poll() is None]
        failed += [p for p in processes if p.popen.returncode and p not in failed]
        if not running:
            break
        if failed:
            deadline = min(deadline, time.monotonic() + _SETTLE)
        for process in running:
            if process not in silent and process.is_silent_after_exception():
                silent.append(process)
                say(
                    f"process {process.number} has gone on in silence after "
                    f"{process.err.last_line.rstrip('.')}: if that ended it, it waits "
                    "for the others, by jax.distributed's default for 5 minutes; "
                    "Ctrl-C ends all."
                )
        time.sleep(_POLL)
    return failed


def _failure(process: _Process, running: Sequence[int]) -> Failure:
    """The failure of a process, while others, by their numbers, ran on."""
    status, stderr = process.popen.returncode, process.err
    is_victim = status in _VICTIM and running
    what = "ended, as another was lost or hangs" if is_victim else "failed first"
    reason = f"process {process.number} {what}, "
    if status < 0:
        names = {each.value: each.name for each in signal.Signals}
        # Real-time signals have no name.
        reason += f"killed by {names.get(-status, f'signal {-status}')}"
        if status == -signal.SIGKILL:
            reason += ", as a system sends when memory runs out"
    else:
        reason += f"with exit status {status}"
    # Of signals, SIGABRT alone is what jax.distributed sends after an exception.
    tells_why = status >= 0 or (status == -signal.SIGABRT and stderr.is_exception)
    said = stderr.last_line if tells_why else ""
    if said:
        reason += f": {said.rstrip('.')}"
    if running:
        reason += f"; still running then: process {', '.join(map(str, running))}"
    is_mistake = status == USAGE_EXIT or (
        status != LOST_EXIT and said.startswith("error: ")
    )
    return Failure(reason, 128 - status if status < 0 else status, is_mistake)


def _end(processes: Sequence[_Process], grace: float, signals: Sequence[int]) -> None:
    """Ends all processes and those that they have started, at a second SIGINT now."""
    for sent in ((signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):
        for process, number in itertools.product(processes, sent):
            process.send(number)
        deadline = time.monotonic() + grace
        while any(process.send(0) for process in processes):
            if time.monotonic() >= deadline or signals.count(signal.SIGINT) > 1:
                break
            time.sleep(_POLL)
    for process in processes:
        process.popen.wait()


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
