"""Faults end in bounded time with a sentence, and lose nothing but the last steps."""

import subprocess
import sys
import threading
import time

import pytest
from launching import ROOT, Launched, script

from onebit_launch.errors import LOST_EXIT
from train.core.processes.session import one_sentence
from train.core.processes.watchdog import Watchdog

WATCHED = """
import sys, time
from train.core.processes.watchdog import Watchdog
with Watchdog(float(sys.argv[1])) as watchdog:
    watchdog.expect("step 7")
    exec(sys.argv[2])
print("went on")
"""


def watched(seconds, waiting):
    return subprocess.run(
        [sys.executable, "-c", WATCHED, str(seconds), waiting],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    "waiting",
    [
        "time.sleep(60)",
        # A main thread that no signal reaches, as one inside XLA.
        "import ctypes; ctypes.CDLL(None).sleep(60)",
    ],
)
def test_what_does_not_end_in_time_ends_the_process(waiting):
    done = watched(0.5, waiting)
    assert done.returncode == LOST_EXIT
    assert done.stderr == (
        "\nerror: step 7 did not end within 0.5 s: another process hangs or a link is "
        "down; start again, a training with --resume, or give a longer --timeout.\n"
    )


@pytest.mark.parametrize(
    "waiting",
    [
        "for i in range(4): time.sleep(0.3); watchdog.expect(f'step {i}')",
        "watchdog.expect(''); time.sleep(1.5)",
        # Stopped from outside, and continued.
        "import os, subprocess\n"
        "subprocess.Popen(['sh', '-c', f'sleep 1.5; kill -CONT {os.getpid()}'])\n"
        "os.kill(os.getpid(), 19)",
    ],
)
def test_what_goes_on_is_left_alone(waiting):
    done = watched(1.0, waiting)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


def test_a_watchdog_ends_with_what_it_watches():
    with Watchdog(0.1) as watchdog:
        watchdog.expect("a step")
    # It would have ended this process.
    time.sleep(0.4)
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_too_little_memory_is_one_sentence_and_no_reason_to_start_again(capsys):
    with pytest.raises(SystemExit) as ended, one_sentence():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory: 9 GB\nand more")
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: there is too little memory (RESOURCE_EXHAUSTED: ")
    assert said.endswith("with --accumulate.\n")
    with pytest.raises(RuntimeError, match="other"), one_sentence():
        raise RuntimeError("other")


DYING = """
from train.core.errors import InputError
from train.core.processes.distributed import Cluster
from train.core.processes.session import join, one_sentence
join(Cluster(), None)
with one_sentence():
    time.sleep(60 * process)
    sys.stderr.write("Traceback (most recent call last):\\n    return")
    raise InputError("the disk is full")
"""


def test_a_sentence_has_a_line_of_its_own_beside_a_thread_that_prints(tmp_path):
    """As Orbax's threads do; what ends a process was lost in half a line of theirs."""
    command = script(tmp_path, DYING)
    path = {"PYTHONPATH": str(ROOT)}
    with Launched("--grace", 0.1, command=command, env=path) as launched:
        assert launched.end() == 1
    assert "process 0 failed first, with exit status 1: error: the disk is full" in (
        launched.said
    )


def test_ctrl_c_does_not_wait_for_an_orderly_end():
    """In which threads that compile have ended in segmentation faults."""
    code = (
        "import atexit\n"
        "from train.core.processes.session import one_sentence\n"
        "atexit.register(print, 'orderly')\n"
        "with one_sentence():\n"
        "    print('begun')\n"
        "    raise KeyboardInterrupt('stopped; --resume goes on')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (130, "begun\n")
    assert done.stderr == "\nstopped; --resume goes on\n"
