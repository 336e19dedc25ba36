"""Processes of a study have their own cores, and do not outlive the study."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import is_running

from benchmarks.convergence.pool import processes

ROOT = Path(__file__).parents[2]


def soon(condition):
    until = time.monotonic() + 120
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def test_processes_share_the_cores_out(tmp_path):
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")

    def shares():
        return [os.sched_getaffinity(p.pid) for p in multiprocessing.active_children()]

    with processes(2, tmp_path) as pool:
        for _ in range(2):
            pool.submit(time.sleep, 1)
        assert soon(lambda: len(shares()) == 2 and not set.intersection(*shares()))
        assert set.union(*shares()) == cores


def interrupted(folder):
    with processes(1, folder) as pool:
        for seconds in (600, 0):
            pool.submit(time.sleep, seconds)
        raise KeyboardInterrupt


def test_an_exception_does_not_wait_for_what_is_at_work(tmp_path):
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path)
    assert time.monotonic() - begun < 300


def test_processes_end_with_the_one_that_made_them(tmp_path):
    code = f"""
import os, time
from pathlib import Path
from benchmarks.convergence.pool import processes
with processes(1, Path({str(tmp_path)!r})) as pool:
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600).result()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as study:
        process = study.stdout.readline().strip()
        assert is_running(process)
        study.send_signal(signal.SIGKILL)
    assert soon(lambda: not is_running(process))
