"""Two runs in one folder are refused; a run that was killed is in nobody's way."""

import errno
import signal
import subprocess
import sys

import pytest
from launching import ROOT

from train.core import lock, run_folder
from train.core.errors import InputError


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


def test_a_folder_in_use_is_refused_until_its_run_has_ended(tmp_path, other):
    (tmp_path / run_folder.FILE).touch()
    in_use = pytest.raises(InputError, match=rf"in use .*process {other.pid}\); wait f")
    for _ in range(2):
        with in_use, lock.held(tmp_path):
            pass
    # Nor is a new run told to go on with the one in use.
    with in_use:
        run_folder.check_free(tmp_path)
    other.stdin.close()
    assert other.wait(30) == 0
    assert not (tmp_path / lock.FILE).exists()
    with lock.held(tmp_path):
        pass


def test_a_killed_run_is_in_nobodys_way(tmp_path, other):
    other.send_signal(signal.SIGKILL)
    other.wait(30)
    assert str(other.pid) in (tmp_path / lock.FILE).read_text()
    with lock.held(tmp_path):
        assert str(other.pid) not in (tmp_path / lock.FILE).read_text()
    assert not list(tmp_path.iterdir())


def test_a_folder_without_locks_is_told_of_and_used(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(lock.fcntl, "lockf", fail)
    with lock.held(tmp_path):
        assert "has no locks on files: start no second" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
