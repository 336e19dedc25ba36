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
    with drill.run(out) as launched:
        victim = launched.pids()[process]
        launched.until(lambda: latest_step(out) >= BEFORE)
        launched.until(lambda: any("tmp" in name for name in checkpoints(out)))
        os.kill(victim, signal.SIGKILL)
        assert launched.end(30) == 128 + signal.SIGKILL
        launched.assert_nothing_is_left()
    assert f"process {process} failed first, killed by SIGKILL" in launched.said
    half, whole = (
        {name for name in checkpoints(out) if ("tmp" in name) == is_half}
        for is_half in (True, False)
    )
    assert len(half) == 1
    assert latest_step(out) == max(map(int, whole)) >= BEFORE
    drill.finish(drill.resume(out))
    drill.assert_nothing_was_lost(out)  # nor is anything half written left


def test_files_that_cannot_be_written_whole(drill, tmp_path):
    """As on a full disk, without the right to mount one."""
    out = tmp_path / "run"
    with drill.run(out) as launched:
        pids = launched.pids()
        launched.until(lambda: latest_step(out) >= BEFORE)
        for pid in pids.values():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
        assert launched.end(60) == 1
        launched.assert_nothing_is_left()
    assert_said_and_gone_on_from(drill, out, launched.said, "File too large")


@pytest.fixture
def disk(tmp_path):
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


def test_a_full_disk(drill, disk):
    out, filling = disk / "run", disk / "filling"
    with drill.run(out) as launched:
        launched.pids()
        launched.until(lambda: latest_step(out) >= BEFORE)
        with filling.open("wb") as file:
            free = os.statvfs(disk)
            file.write(bytes(free.f_bavail * free.f_frsize - 100_000))
        assert launched.end(60) == 1
        launched.assert_nothing_is_left()
    filling.unlink()
    assert_said_and_gone_on_from(drill, out, launched.said, "No space left on device")


def assert_said_and_gone_on_from(drill, out, said, reason):
    newest = latest_step(out)
    assert BEFORE <= newest < len(steps_of(out))
    sentence = (
        f"error: the checkpoint of step {newest + 5} cannot be written to "
        f"{out / 'checkpoints'} ({reason}); mend that (there must be room for 3 of "
        f"them), and go on from that of step {newest} by --resume."
    )
    assert sentence in said
    assert "failed first, with exit status 1: error: the checkpoint of step" in said
    drill.finish(drill.resume(out))
    drill.assert_nothing_was_lost(out)
