"""Two runs in one folder are refused; a run that was killed is in nobody's way."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from launching import ROOT

from train.core import lock, run_folder
from train.core.errors import InputError

ELSEWHERE = "another boot\nnode7, process 42\n"


@pytest.fixture
def other(tmp_path):
    """Another process that holds the folder."""
    code = (
        "import pathlib, sys\n"
        "from train.core import lock\n"
        "with lock.held(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"held\n"
    with process:
        yield process


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(lock, "DEAD", 0.5)
    monkeypatch.setattr(lock, "_POLL", 0.02)


@pytest.fixture
def beating(tmp_path):
    """A file of another machine's run, which lives."""
    (tmp_path / lock.FILE).write_text(ELSEWHERE)
    ended = threading.Event()

    def beat():
        while not ended.wait(0.02):
            os.utime(tmp_path / lock.FILE)

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    ended.set()
    thread.join()


def test_a_folder_in_use_is_refused_until_its_run_has_ended(tmp_path, other):
    in_use = pytest.raises(InputError, match=rf"in use .*process {other.pid}\); wait f")
    for _ in range(2):
        with in_use, lock.held(tmp_path):
            pass
    other.stdin.close()
    assert other.wait(30) == 0
    assert not (tmp_path / lock.FILE).exists()
    with lock.held(tmp_path):
        pass


def test_a_new_run_is_told_of_the_one_in_use_and_not_to_go_on_with_it(tmp_path, other):
    (tmp_path / run_folder.FILE).touch()
    with pytest.raises(InputError, match=rf"in use .*process {other.pid}\); wait f"):
        run_folder.check_free(tmp_path)
    other.send_signal(signal.SIGKILL)
    other.wait(30)
    with pytest.raises(InputError, match="go on with it by --resume"):
        run_folder.check_free(tmp_path)


def test_a_killed_run_is_in_nobodys_way(tmp_path, other, capsys):
    other.send_signal(signal.SIGKILL)
    other.wait(30)
    assert str(other.pid) in (tmp_path / lock.FILE).read_text()
    with lock.held(tmp_path):
        assert str(other.pid) not in (tmp_path / lock.FILE).read_text()
    assert not list(tmp_path.iterdir())
    assert "waiting" not in capsys.readouterr().out


def test_a_run_of_another_machine_that_is_dead(tmp_path, soon, capsys):
    (tmp_path / lock.FILE).write_text(ELSEWHERE)
    with lock.held(tmp_path):
        pass
    assert "for a sign of life of node7, process 42" in capsys.readouterr().out


def test_a_run_that_ends_while_it_is_looked_at_leaves_its_folder(
    tmp_path, soon, monkeypatch
):
    file = tmp_path / lock.FILE
    file.write_text(ELSEWHERE)
    monkeypatch.setattr(lock, "DEAD", 20.0)
    ended = threading.Timer(0.1, file.unlink)
    ended.start()
    with lock.held(tmp_path):
        # Not a file that others do not see.
        assert f"process {os.getpid()}" in file.read_text()
    ended.join()


@pytest.mark.parametrize("locks", ["of one machine", "none"])
def test_a_run_of_another_machine_that_lives(
    tmp_path, soon, beating, monkeypatch, locks
):
    def fail(*_):
        raise OSError(errno.ENOLCK, "no locks")

    if locks == "none":
        monkeypatch.setattr(lock.fcntl, "lockf", fail)
    with pytest.raises(InputError, match=r"\(node7, process 42\)"), lock.held(tmp_path):
        pass
    assert (tmp_path / lock.FILE).read_text() == ELSEWHERE


def test_a_run_gives_signs_of_life(tmp_path, monkeypatch):
    """Also after one that the file system did not take."""
    calls, utime = [], os.utime

    def fail_first(file):
        calls.append(file)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "stale")
        utime(file)

    monkeypatch.setattr(lock.os, "utime", fail_first)
    monkeypatch.setattr(lock, "BEAT", 0.02)
    with lock.held(tmp_path):
        first = (tmp_path / lock.FILE).stat().st_mtime_ns
        deadline = time.monotonic() + 20
        while (tmp_path / lock.FILE).stat().st_mtime_ns == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
