"""Running `python -m train.launch` beside a test, and looking at what is left of it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

ROOT = Path(__file__).parents[1]
# Tests that run in a shell's background would hand on that SIGINT is ignored.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SMALL_PRETRAIN = str(ROOT / "tests" / "small_pretrain.py")


def script(folder, text, *arguments):
    """A command that runs a text as Python, with what it is likely to need."""
    file = folder / "script.py"
    file.write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "process = int(os.environ['JAX_PROCESS_ID'])\n"
        f"{text}\n"
    )
    return [file, *arguments]


class Launched:
    """A launcher that runs, its output read as it comes.

    As a context: whatever happens in a test, nothing is left after it.
    """

    def __init__(self, *arguments, processes=2, command=(), env=None):
        launcher = (sys.executable, "-m", "train.launch", "--processes", processes)
        self.process = subprocess.Popen(
            [str(each) for each in (*launcher, *arguments, "--", *command)],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = []
        self.workers = {}
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        for pid in [self.process.pid, *self.workers.values()]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        self.reader.join(10)
        self.process.stdout.close()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def said(self):
        return "\n".join(self.lines)

    def until(self, condition, seconds=120.0):
        """Waits for a condition; the launcher must still run then."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.002)

    def pids(self, processes=2):
        """The processes that the launcher has started, by their number."""
        self.until(lambda: len(_children(self.process.pid)) == processes)
        self.workers = _children(self.process.pid)
        return self.workers

    def end(self, seconds=120.0):
        """Waits for the end; returns the exit status."""
        status = self.process.wait(seconds)
        self.reader.join(10)
        return status

    def assert_nothing_is_left(self):
        deadline = time.monotonic() + 5
        while left := [pid for pid in self.workers.values() if is_running(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)


def is_running(pid):
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def _stat(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _children(parent):
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _stat(folder.name)[1] != str(parent):
                continue
            lines = (folder / "environ").read_text().split("\0")
            for line in lines:
                name, _, value = line.partition("=")
                if name == "JAX_PROCESS_ID":
                    children[int(value)] = int(folder.name)
    return children


def arrays_of(folder, step):
    """All arrays of a checkpoint, by their paths, whoever wrote them."""
    path = (folder / "checkpoints" / str(step) / "arrays").resolve()
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        options = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        arrays = checkpointer.restore(path, restore_args=options)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x)
        for path, x in jax.tree.leaves_with_path(arrays)
    }
