"""Checkpoints that are not finished: the disk is full, or a process is killed."""

import os
import resource
import signal
import subprocess

import pytest
from runs import steps_of

from train.core.checkpoint import latest_step

BEFORE = 15
"""Steps of the newest checkpoint when the fault comes."""


def checkpoints(out):
    return {path.name for path in (out / "checkpoints").iterdir()}


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_killed_in_the_middle_of_a_checkpoint(drill, tmp_path, process):
    out = tmp_path / "run"
    with drill.until(out, BEFORE) as launched:
        launched.until(lambda: latest_step(out) >= BEFORE)
        launched.until(lambda: any("tmp" in name for name in checkpoints(out)))
        os.kill(launched.workers[process], signal.SIGKILL)
        assert launched.end(30) == 128 + signal.SIGKILL
    assert f"process {process} failed first, killed by SIGKILL" in launched.said
    (half,) = (name for name in checkpoints(out) if "tmp" in name)
    assert latest_step(out) == max(map(int, checkpoints(out) - {half})) >= BEFORE
    drill.assert_goes_on(out)  # nor is anything half written left


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a few megabytes."""
    if os.geteuid():
        pytest.skip("mounting a small file system takes root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk(drill, small_disk):
    filling = small_disk / "filling"

    def fill(_):
        free = os.statvfs(small_disk)
        filling.write_bytes(bytes(free.f_bavail * free.f_frsize - 100_000))

    newest_checkpoint_is_told(
        drill, small_disk / "run", fill, "No space left on device"
    )
    filling.unlink()
    drill.assert_goes_on(small_disk / "run")


def test_files_that_cannot_be_written_whole(drill, tmp_path):
    """As on a full disk, without the right to mount one."""

    def limit(pids):
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, 20_000))

    newest_checkpoint_is_told(drill, tmp_path / "run", limit, "File too large")
    drill.assert_goes_on(tmp_path / "run")


def newest_checkpoint_is_told(drill, out, fault, reason):
    with drill.until(out, BEFORE) as launched:
        launched.until(lambda: latest_step(out) >= BEFORE)
        fault(launched.workers.values())
        assert launched.end(60) == 1
    newest = latest_step(out)
    assert BEFORE <= newest < len(steps_of(out))
    sentence = (
        f"error: the checkpoint of step {newest + 5} cannot be written to "
        f"{out / 'checkpoints'} ({reason}); mend that (there must be room for 3 of "
        f"them), and go on from that of step {newest} by --resume."
    )
    assert sentence in launched.said
    assert "failed first, with exit status 1: error: the checkpoint of step" in (
        launched.said
    )
