"""Processes that each train one run after another, on cores of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def processes(jobs: int, programs: Path) -> Iterator[ProcessPoolExecutor]:
    """Processes that keep their Python for the next run.

    They end with the process that made them, however it ends, and are ended at an
    exception. Where they are several, each has its share of the cores; compiled
    programs are kept, which runs that differ in the seed share.
    """
    spawn = multiprocessing.get_context("spawn")
    cores = spawn.SimpleQueue()
    for share in _shares(jobs):
        cores.put(share)
    with ProcessPoolExecutor(jobs, spawn, _begin, (cores, programs)) as pool:
        try:
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _shares(jobs: int) -> list[set[int]]:
    """The cores of each process; all of them where they cannot be shared out."""
    cores = sorted(os.sched_getaffinity(0))
    if jobs == 1 or jobs > len(cores):
        return [set(cores)] * jobs
    return [set(cores[job::jobs]) for job in range(jobs)]


def _begin(cores: Any, programs: Path) -> None:
    """Prepares a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that made it decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Before JAX makes its threads, as many as there are cores.
    os.sched_setaffinity(0, cores.get())
    # Compiling takes half of a short run; even the smallest programs add up.
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)
