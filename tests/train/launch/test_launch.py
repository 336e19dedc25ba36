"""The launcher: several processes that start, speak and end together."""

import os
import signal
import subprocess
import sys

import pytest
from launching import ROOT, Launched, is_running

from onebit_launch.environment import environments, free_port
from onebit_launch.errors import UsageError
from onebit_launch.output import open_sinks
from train.launch.command import check_restarts, run_folder_of

NEEDS_PROC = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc"
)
NEEDS_FULL_DISK = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="writes to a disk that is full"
)
MUCH = "for i in range(2000): print('x' * 100)"


@pytest.fixture
def script(tmp_path):
    """A command that runs a text as Python, with what it is likely to need."""

    def make(text, *arguments):
        file = tmp_path / "script.py"
        file.write_text(
            "import os, pathlib, signal, subprocess, sys, time\n"
            "process = int(os.environ['JAX_PROCESS_ID'])\n"
            f"{text}\n"
        )
        return [file, *arguments]

    return make


def run(*arguments, command, processes=2):
    with Launched(*arguments, command=command, processes=processes) as launched:
        return launched.end(30), launched.said


def test_each_process_is_told_its_place_and_speaks_under_its_number(script):
    text = (
        "print(os.environ['JAX_NUM_PROCESSES'], os.environ['JAX_NUM_CPU_DEVICES'],"
        "os.environ['JAX_LOCAL_DEVICE_IDS'], sys.argv[1:])\n"
        # Of a bar that is drawn again and again, a file takes the last.
        "sys.stderr.write('\\r10%\\r20%\\r30%\\nno end')"
    )
    flags = ("--devices-per-process", "2")
    status, said = run(*flags, command=script(text, "--out", "x"), processes=3)
    assert status == 0
    assert sorted(said.splitlines()) == [
        line
        for number, devices in enumerate(("0,1", "2,3", "4,5"))
        for line in (
            f"[{number}] 3 2 {devices} ['--out', 'x']",
            f"[{number}] 30%",
            f"[{number}] no end",
        )
    ]


def test_all_processes_have_the_same_coordinator_of_this_machine():
    first, second = environments(2, 1, "127.0.0.1:1234")
    assert first["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:1234"
    assert {k for k in first if first[k] != second[k]} == {
        "JAX_PROCESS_ID",
        "JAX_LOCAL_DEVICE_IDS",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    }


def test_output_is_filed_by_process_over_all_attempts(script, tmp_path):
    logs = tmp_path / "logs"
    text = (
        "print('hello', process)\n"
        "if process:\n"
        "    again = pathlib.Path(__file__).with_name('again')\n"
        "    if again.exists(): os._exit(9)\n"
        "    again.touch()\n"
        "    sys.exit('went wrong')"
    )
    logs.mkdir()
    (logs / "0.log").write_text("before\n")
    status, said = run(
        *("--restarts", 1, "--log-dir", logs), command=script(text, "--out", tmp_path)
    )
    assert (logs / "0.log").read_text() == "before\n" + "hello 0\n" * 2
    assert (logs / "1.log").read_text() == "hello 1\nwent wrong\nhello 1\n"
    assert status == 9
    first, _, second = said.splitlines()
    assert first == "[launch] process 1 failed first, with exit status 1: went wrong."
    assert second == "[launch] process 1 failed first, with exit status 9: hello 1."


@NEEDS_PROC
def test_a_failure_ends_all_and_is_named(script):
    text = (
        "if process == 1: pathlib.Path(sys.argv[1]).touch()\n"
        "if process == 2: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)\n"
        "if process == 1: print('a sentence.', file=sys.stderr); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    command = script(text)
    ready, go = (command[0].with_name(name) for name in ("ready", "go"))
    with Launched(
        "--grace", "0.2", command=[*command, ready, go], processes=3
    ) as launched:
        launched.until(ready.exists)
        launched.pids(3)
        go.touch()
        assert launched.end(20) == 3
        launched.assert_nothing_is_left()
    assert launched.lines == [
        "[1] a sentence.",
        "[launch] process 1 failed first, with exit status 3: a sentence; still "
        "running then: process 0, 2.",
    ]


def test_a_process_that_ends_for_one_that_hangs_is_not_blamed(script):
    text = "if process == 0: sys.exit(75)\ntime.sleep(60)"
    status, said = run(command=script(text), processes=2)
    assert status == 75
    assert said.splitlines()[-1] == (
        "[launch] process 0 ended, as another was lost or hangs, with exit status 75; "
        "still running then: process 1."
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import jax; jax.jit(lambda x: len(x))(1.0)", "TypeError: len() of unsized"),
        ("raise ValueError('first line\\n  second line\\nthird')", "ValueError: first"),
        ("try: 1 / 0\nexcept OSError: pass", "ZeroDivisionError: division by zero"),
        ("try: 1 / 0\nexcept ArithmeticError: raise OSError('no')", "OSError: no"),
        (
            "import traceback\ntry: 1 / 0\nexcept ArithmeticError: "
            "traceback.print_exc(); sys.exit('error: a sentence')",
            "error: a sentence",
        ),
        (
            "import traceback\ntry: 1 / 0\nexcept ArithmeticError:\n"
            "    print('error: a sentence', file=sys.stderr)\n"
            "    traceback.print_exc()\n"
            "    print('another thread', file=sys.stderr); sys.exit(1)",
            "error: a sentence",
        ),
    ],
)
def test_the_exception_is_told_and_not_what_follows_it(script, text, told):
    status, said = run(command=script(text), processes=1)
    assert status == 1
    reason = said.splitlines()[-1]
    assert f"failed first, with exit status 1: {told}" in reason


def test_a_process_that_waits_after_its_exception_is_told_of(script):
    """As jax.distributed waits, at a process's end, for those that wait for it.

    One that has logged an exception and prints on, or has ended well, is not.
    """
    text = (
        "import traceback\n"
        "time.sleep(0.5 if process == 1 else 0)\n"  # the others had time to be told of
        "try: 1 / 0\n"
        "except ArithmeticError: traceback.print_exc()\n"
        "for _ in range(0 if process == 2 else 2000):\n"
        "    if pathlib.Path(sys.argv[1]).exists(): break\n"
        "    time.sleep(0.01)\n"
        "    if process == 0: print('on')\n"
        "sys.exit(process % 2)"
    )
    impatient = (
        "from onebit_launch import command, processes\n"
        "processes._PATIENCE = 0.5\n"
        "command.main()"
    )
    command = script(text)
    told = command[0].with_name("told")
    flags = ("--processes", "3", "--", *command, told)
    with subprocess.Popen(
        [sys.executable, "-c", impatient, *map(str, flags)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        lines = (each for each in launcher.stderr if each.startswith("[launch] "))
        first = next(lines)
        told.touch()
        (last,) = lines
    reason = "ZeroDivisionError: division by zero"
    assert first.startswith(
        f"[launch] process 1 has gone on in silence after {reason}: if that ended it"
    )
    assert last == f"[launch] process 1 failed first, with exit status 1: {reason}.\n"


def test_a_second_sigint_ends_processes_that_do_not_end(script):
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1); time.sleep(60)"
    with Launched("--grace", "50", command=script(text)) as launched:
        launched.until(lambda: len(launched.lines) == 2)
        launched.process.send_signal(signal.SIGINT)
        launched.until(lambda: "again to end them now" in launched.said)
        launched.process.send_signal(signal.SIGINT)
        assert launched.end(20) == 128 + signal.SIGINT


def test_a_line_comes_whole_however_long_it_is(script):
    # The reads that it takes must not each look at all that came before.
    text = "sys.stdout.buffer.write(b'\\xff' + b'x' * 30_000_000 + b'|')"
    file = script(text)[0].with_name("said")
    launcher = [sys.executable, "-m", "train.launch", "--processes", "1", "--"]
    with file.open("wb") as stdout:
        subprocess.run(
            [*launcher, *script(text)], cwd=ROOT, stdout=stdout, check=True, timeout=30
        )
    assert file.read_bytes() == b"[0] \xff" + b"x" * 30_000_000 + b"|\n"


REAL_TIME = "os.kill(os.getpid(), 40)"
KILLED, ABORTED, LOST = "os.kill(os.getpid(), 9)", "os.abort()", "sys.exit(75)"
# As jax.distributed ends a process that an exception has ended.
RAISED = "import atexit; atexit.register(os.abort); raise OSError('x')"
CRASHED = "print('Traceback (most recent call last):\\nOSError: x', file=sys.stderr); "
CRASHED += "os.kill(os.getpid(), 11)"


@pytest.mark.parametrize(
    ("early", "late", "status", "reason"),
    [
        (LOST, KILLED, 137, "process 1 failed first, killed by SIGKILL"),
        (ABORTED, "sys.exit('x')", 1, "process 1 failed first, with exit status 1: x"),
        # Of those that end for another the first in time, which may say why.
        (LOST, ABORTED, 75, "process 0 failed first, with exit status 75"),
        (ABORTED, LOST, 134, "process 0 failed first, killed by SIGABRT"),
        (ABORTED, RAISED, 134, "process 1 failed first, killed by SIGABRT: OSError: x"),
        (LOST, REAL_TIME, 168, "process 1 failed first, killed by signal 40"),
        # An exception that was logged does not say why another signal came.
        (ABORTED, CRASHED, 139, "process 1 failed first, killed by SIGSEGV."),
    ],
)
def test_a_process_that_ends_for_another_is_not_the_first(
    script, early, late, status, reason
):
    text = f"if process == 0: {early}\ntime.sleep(0.4); {late}"
    ended, said = run(command=script(text), processes=2)
    assert said.splitlines()[-1].startswith(f"[launch] {reason}")
    assert ended == status


@NEEDS_PROC
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_launcher(script, number, tmp_path):
    text = (
        "child = subprocess.Popen(['sleep', '60'])\n"
        "pathlib.Path(sys.argv[1], str(process)).write_text(str(child.pid))\n"
        "time.sleep(60)"
    )
    command = script(text, tmp_path, "--out", tmp_path)
    with Launched("--restarts", "3", command=command) as launched:
        files = [tmp_path / name for name in "01"]
        launched.until(lambda: all(f.exists() and f.read_text() for f in files))
        launched.pids()
        grandchildren = [int(file.read_text()) for file in files]
        launched.process.send_signal(number)
        status = launched.end(20)
        launched.assert_nothing_is_left()
    if number == signal.SIGKILL:
        for pid in grandchildren:  # they are the killed processes' own to end
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
    else:
        assert status == 128 + number
        again = "; again to end them now" if number == signal.SIGINT else ""
        assert launched.lines == [
            f"[launch] {number.name}: the processes are to end within 10 s{again}.",
            f"[launch] ended by {number.name}.",
        ]
        assert not any(map(is_running, grandchildren))


@pytest.mark.parametrize("begun", [True, False])
def test_a_restart_goes_on_with_a_run_that_has_begun(script, tmp_path, begun):
    out = tmp_path / "run"
    out.mkdir()
    text = (
        "print(process, *sys.argv[1:], flush=True)\n"
        "out = pathlib.Path(sys.argv[2])\n"
        f"if {begun}: (out / 'config.json').touch()\n"
        "mark = out / 'failed'\n"
        "time.sleep(0.2)\n"
        "if process == 1 and not mark.exists(): mark.touch(); sys.exit(1)"
    )
    status, said = run("--restarts", "2", command=script(text, "--out", out))
    assert status == 0, said
    resume = " --resume" if begun else ""
    lines = [line for line in said.splitlines() if line.startswith("[1] ")]
    assert lines == [f"[1] 1 --out {out}", f"[1] 1 --out {out}{resume}"]
    assert f"restart 1 of 2: python {tmp_path}/script.py --out {out}{resume}" in said
    assert "restart 2" not in said


def test_restarts_come_to_an_end(script, tmp_path):
    (tmp_path / "config.json").touch()
    command = script("sys.exit(4)", f"--out={tmp_path}")
    status, said = run("--restarts", "2", command=command, processes=1)
    assert status == 4
    assert said.count("failed first, with exit status 4") == 3
    assert "--resume" not in said  # the run was there before


def test_a_mistake_that_was_named_is_not_tried_again(script, tmp_path):
    text = "sys.exit('error: there is no corpus; give --corpus.')"
    status, said = run("--restarts", "2", command=script(text, "--out", tmp_path))
    assert status == 1
    assert "restart" not in said


def test_a_mistake_on_the_command_line_is_not_tried_again(script, tmp_path):
    text = "import tyro\ndef main(out: str): ...\ntyro.cli(main, prog='this')"
    command = script(text, "--out", tmp_path, "--stops", "3")
    status, said = run("--restarts", "2", command=command, processes=1)
    assert status == 2
    assert "Unrecognized options: --stops" in said
    assert said.splitlines()[-1] == (
        "[launch] process 0 failed first, with exit status 2: For full helptext, run "
        "this --help."
    )


@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_port_that_was_lost_to_another_is_chosen_again(script, tmp_path, is_chosen):
    text = (
        "import socket\n"
        "from train.core.processes.session import one_sentence\n"
        "from train.core.processes.distributed import Cluster, initialize\n"
        "address, port = os.environ['JAX_COORDINATOR_ADDRESS'].split(':')\n"
        "with one_sentence(), socket.create_server(('', int(port))):\n"
        "    initialize(Cluster(coordinator=f'{address}:{port}'))"
    )
    address = f"127.0.0.1:{free_port()}"
    own = () if is_chosen else ("--hosts", "1", "--coordinator", address)
    status, said = run(
        *("--restarts", "1", *own),
        command=script(f"if process: time.sleep(60)\n{text}", "--out", tmp_path),
    )
    assert status == 1
    assert said.count("[0] error: process 0 cannot listen on port") == 1 + is_chosen
    assert ("restart 1 of 1" in said) == is_chosen


def test_training_goes_on_when_nobody_reads_along(script, tmp_path):
    done = tmp_path / "done"
    text = f"{MUCH}\npathlib.Path(sys.argv[1]).touch()"
    flags = [sys.executable, "-m", "train.launch", "--processes", "1", "--"]
    launcher = subprocess.Popen(
        [*flags, *map(str, script(text, done))], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert launcher.stdout.readline().startswith(b"[0] x")
    launcher.stdout.close()
    assert launcher.wait(30) == 0
    assert done.exists()


@NEEDS_FULL_DISK
def test_training_goes_on_when_the_disk_is_full(script, tmp_path):
    (tmp_path / "0.log").symlink_to("/dev/full")
    done = tmp_path / "done"
    command = script(f"{MUCH}\npathlib.Path(sys.argv[1]).touch()", done)
    status, said = run("--log-dir", tmp_path, command=command, processes=1)
    assert status == 0, said
    assert done.exists()
    assert said == (
        f"[launch] {tmp_path}/0.log cannot be written to (No space left on device); "
        "the processes go on, and what it should have held from here on is lost."
    )


@NEEDS_FULL_DISK
def test_the_exit_status_is_told_where_nothing_can_be_said(script):
    flags = [sys.executable, "-m", "train.launch", "--processes", "1", "--"]
    command = [*flags, *map(str, script(f"{MUCH}\nsys.exit(3)"))]
    with open("/dev/full", "wb") as full:
        launcher = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=full, timeout=60
        )
    assert launcher.returncode == 3


def test_logs_that_cannot_be_kept_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UsageError, match=r"--log-dir .*file cannot be written to"),
        open_sinks([0], tmp_path / "file"),
    ):
        pass


@pytest.mark.parametrize(
    ("restarts", "message"),
    [(-1, "must not be negative"), (1, "--restarts needs the run's folder")],
)
def test_restarts_that_cannot_be_made_are_refused(restarts, message):
    with pytest.raises(UsageError, match=message):
        check_restarts(restarts, None)


def test_the_runs_folder_is_read_off_the_command():
    assert str(run_folder_of(["-m", "x", "--out", "a/b", "--y", "3"])) == "a/b"
    assert str(run_folder_of(["x.py", "--out=a/b", "--y"])) == "a/b"
    assert run_folder_of(["x.py", "--outer", "a", "--o", "b", "--out"]) is None
