"""One process a host, told what to do a line of JSON at a time."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.network.hosts import Host

# Large pages for large arrays, as where the kernel gives them to all: with pages of
# 4 KiB a virtual machine spends half of an exchange looking up addresses.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "JAX_PLATFORMS": "cpu"}
TAIL = 20
"""Lines of a failed process's output that are shown."""


class Processes(NamedTuple):
    """The running processes, in the hosts' order, with the files of what they print."""

    hosts: tuple[Host, ...]
    running: tuple[subprocess.Popen[str], ...]
    logs: tuple[Path, ...]

    def ask(self, request: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Sends all of them a request, and gives their replies in the hosts' order.

        Raises:
          RuntimeError: If a process ends or does not reply in time; with what it
            printed last.
        """
        deadline = time.monotonic() + seconds
        waiting = selectors.DefaultSelector()
        with waiting:
            for i, process in enumerate(self.running):
                assert process.stdin
                assert process.stdout
                try:
                    process.stdin.write(json.dumps(request) + "\n")
                    process.stdin.flush()
                except BrokenPipeError:
                    raise self._failed(i, "ended") from None
                waiting.register(process.stdout, selectors.EVENT_READ, i)
            replies: dict[int, dict[str, Any]] = {}
            while len(replies) < len(self.running):
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = next(i for i in range(len(self.hosts)) if i not in replies)
                    raise self._failed(late, f"did not reply within {seconds:.0f} s")
                for key, _ in ready:
                    process = self.running[key.data]
                    assert process.stdout
                    line = process.stdout.readline()
                    if not line:
                        raise self._failed(key.data, "ended")
                    replies[key.data] = json.loads(line)
                    waiting.unregister(key.fileobj)
        return [replies[i] for i in range(len(self.running))]

    def _failed(self, index: int, what: str) -> RuntimeError:
        lines = self.logs[index].read_text("utf-8", "replace").splitlines()[-TAIL:]
        printed = "\n".join(lines) or "nothing"
        host = self.hosts[index].name
        return RuntimeError(
            f"the process on {host} {what}; it printed last:\n{printed}"
        )


@contextlib.contextmanager
def started(
    hosts: Sequence[Host], argv: Sequence[str], folder: Path
) -> Iterator[Processes]:
    """A process on each host, killed at the end.

    Args:
      hosts: The hosts.
      argv: Python's arguments; the host's number is added.
      folder: The folder for what they print.
    """
    cores = sorted(os.sched_getaffinity(0))
    running: list[subprocess.Popen[str]] = []
    logs = [folder / f"{host.name}.log" for host in hosts]
    try:
        for i, (host, log) in enumerate(zip(hosts, logs, strict=True)):
            # Threads of several hosts on one core would spin while the others wait.
            core = str(cores[i % len(cores)])
            pinned = ["taskset", "--cpu-list", core, sys.executable, *argv, str(i)]
            with log.open("w", encoding="utf-8") as output:
                process = subprocess.Popen(
                    host.command(pinned),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    env=os.environ | ENVIRONMENT,
                )
            running.append(process)
        yield Processes(tuple(hosts), tuple(running), tuple(logs))
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.communicate()
