"""Processes that each train one run after another."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import jax

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess
    from pathlib import Path
    from typing import Self

Item = TypeVar("Item")
Result = TypeVar("Result")


class Answer(NamedTuple, Generic[Item, Result]):
    """The result of a process for an item, and the seconds that it took."""

    item: Item
    result: Result
    seconds: float


class Pool(Generic[Item, Result]):
    """Processes that each do one item at a time and keep their Python for the next.

    They end with the process that made them, however it ends.

    Args:
      work: What is done to an item; a function of a module.
      jobs: Number of processes; where they are several, each has its share of the
        cores.
      programs: Folder of compiled programs, which runs that differ in the seed share.
    """

    def __init__(
        self,
        work: Callable[[Item], Result],
        jobs: int,
        programs: Path,
    ):
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._idle: list[Connection] = []
        self._busy: dict[Connection, Item] = {}
        for cores in _shares(jobs):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, work, cores, programs), daemon=True
            )
            process.start()
            self._processes.append(process)
            there.close()  # so that its end is seen here
            self._idle.append(here)

    def __enter__(self) -> Self:
        """The pool."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the processes, those that are at work too, and waits for their end."""
        for connection in self._idle:
            connection.send(None)
        if self._busy:
            for process in self._processes:
                process.terminate()
        for process in self._processes:
            process.join()

    @property
    def has_idle(self) -> bool:
        """True if an item can be given to a process."""
        return bool(self._idle)

    @property
    def in_work(self) -> list[Item]:
        """The items that processes are at."""
        return list(self._busy.values())

    def submit(self, item: Item) -> None:
        """Gives an item to an idle process."""
        connection = self._idle.pop()
        connection.send(item)
        self._busy[connection] = item

    def take(self) -> Answer[Item, Result]:
        """Waits for the next answer.

        Raises:
          RuntimeError: A process has failed, or was killed.
        """
        connection = wait(list(self._busy))[0]
        assert isinstance(connection, Connection)
        item = self._busy.pop(connection)
        try:
            result, seconds, error = connection.recv()
        except EOFError:
            raise RuntimeError(f"The process of {item} was killed.") from None
        if error:
            raise RuntimeError(f"{item} has failed:\n{error}")
        self._idle.append(connection)
        return Answer(item, result, seconds)


def _shares(jobs: int) -> list[set[int]]:
    """The cores of each process; all of them where they cannot be shared out."""
    cores = sorted(os.sched_getaffinity(0))
    if jobs == 1 or jobs > len(cores):
        return [set(cores)] * jobs
    return [set(cores[job::jobs]) for job in range(jobs)]


def _serve(
    connection: Connection,
    work: Callable[[Any], Any],
    cores: set[int],
    programs: Path,
) -> None:
    """The life of a process: an item, its answer, the next item."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that made it decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.sched_setaffinity(0, cores)
    # Compiling takes half of a short run; even the smallest programs add up.
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    while (item := connection.recv()) is not None:
        since = time.perf_counter()
        try:
            result, error = work(item), ""
        except BaseException:
            result, error = None, traceback.format_exc()
        connection.send((result, time.perf_counter() - since, error))
        jax.clear_caches()
        gc.collect()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)
