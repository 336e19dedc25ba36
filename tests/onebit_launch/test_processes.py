"""`onebit-launch`: processes that start, speak and end together."""

import os
import signal
import subprocess
import sys

import pytest
from launching import ROOT, Launched, is_running, script

NEEDS_PROC = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc"
)
NEEDS_FULL_DISK = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="writes to a disk that is full"
)
LAUNCHER = [sys.executable, "-m", "onebit_launch", "--processes", "1", "--"]
MUCH = "for i in range(2000): print('x' * 100)"


def run(*arguments, command, processes=2):
    with Launched(*arguments, command=command, processes=processes) as launched:
        return launched.end(30), launched.said


def test_each_process_is_told_its_place_and_speaks_under_its_number(tmp_path):
    text = (
        "print(os.environ['JAX_NUM_PROCESSES'], os.environ['JAX_NUM_CPU_DEVICES'],"
        "os.environ['JAX_LOCAL_DEVICE_IDS'], sys.argv[1:])\n"
        # Of a bar that is drawn again and again, a file takes the last.
        "sys.stderr.write('\\r10%\\r20%\\r30%\\nno end')"
    )
    flags = ("--devices-per-process", "2")
    status, said = run(
        *flags, command=script(tmp_path, text, "--out", "x"), processes=3
    )
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


@NEEDS_PROC
def test_a_failure_ends_all_and_is_named(tmp_path):
    text = (
        "if process == 1: pathlib.Path(sys.argv[1]).touch()\n"
        "if process == 2: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)\n"
        "if process == 1: print('a sentence.', file=sys.stderr); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    command = script(tmp_path, text)
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


def test_a_process_that_ends_for_one_that_hangs_is_not_blamed(tmp_path):
    text = "if process == 0: sys.exit(75)\ntime.sleep(60)"
    status, said = run(command=script(tmp_path, text), processes=2)
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
        ("try: 1 / 0\nexcept ArithmeticError: raise OSError('no')", "OSError: no"),
        (
            "import traceback\ntry: 1 / 0\nexcept ArithmeticError:\n"
            "    traceback.print_exc()\n"
            "    print('error: a sentence', file=sys.stderr)\n"
            "    traceback.print_exc()\n"
            "    print('another thread', file=sys.stderr); sys.exit(1)",
            "error: a sentence",
        ),
    ],
)
def test_the_exception_is_told_and_not_what_follows_it(tmp_path, text, told):
    status, said = run(command=script(tmp_path, text), processes=1)
    assert status == 1
    reason = said.splitlines()[-1]
    assert f"failed first, with exit status 1: {told}" in reason


def test_a_process_that_waits_after_its_exception_is_told_of(tmp_path):
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
    command = script(tmp_path, text)
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


REAL_TIME = "os.kill(os.getpid(), 40)"
ABORTED, LOST = "os.abort()", "sys.exit(75)"
# As jax.distributed ends a process that an exception has ended.
RAISED = "import atexit; atexit.register(os.abort); raise OSError('x')"
CRASHED = "print('Traceback (most recent call last):\\nOSError: x', file=sys.stderr); "
CRASHED += "os.kill(os.getpid(), 11)"


@pytest.mark.parametrize(
    ("early", "late", "status", "reason"),
    [
        (ABORTED, "sys.exit('x')", 1, "process 1 failed first, with exit status 1: x"),
        # Of those that end for another the first in time, which may say why.
        (ABORTED, LOST, 134, "process 0 failed first, killed by SIGABRT"),
        (ABORTED, RAISED, 134, "process 1 failed first, killed by SIGABRT: OSError: x"),
        (LOST, REAL_TIME, 168, "process 1 failed first, killed by signal 40"),
        # An exception that was logged does not say why another signal came.
        (ABORTED, CRASHED, 139, "process 1 failed first, killed by SIGSEGV."),
    ],
)
def test_a_process_that_ends_for_another_is_not_the_first(
    tmp_path, early, late, status, reason
):
    text = f"if process == 0: {early}\ntime.sleep(0.4); {late}"
    ended, said = run(command=script(tmp_path, text), processes=2)
    assert said.splitlines()[-1].startswith(f"[launch] {reason}")
    assert ended == status


def test_a_second_sigint_ends_processes_that_do_not_end(tmp_path):
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1); time.sleep(60)"
    with Launched("--grace", "50", command=script(tmp_path, text)) as launched:
        launched.until(lambda: len(launched.lines) == 2)
        launched.process.send_signal(signal.SIGINT)
        launched.until(lambda: "again to end them now" in launched.said)
        launched.process.send_signal(signal.SIGINT)
        assert launched.end(20) == 128 + signal.SIGINT


@NEEDS_PROC
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_launcher(number, tmp_path):
    text = (
        "child = subprocess.Popen(['sleep', '60'])\n"
        "pathlib.Path(sys.argv[1], str(process)).write_text(str(child.pid))\n"
        "time.sleep(60)"
    )
    command = script(tmp_path, text, tmp_path, "--out", tmp_path)
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


def test_a_signal_that_is_ignored_from_the_start_ends_nothing(tmp_path):
    """As after `nohup`, or after `&` in a shell's script."""
    go = tmp_path / "go"
    text = "print('started')\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)"
    command = script(tmp_path, text, go)
    ignoring = ("/bin/sh", "-c", 'trap "" HUP INT; exec "$@"', "sh")
    with subprocess.Popen(
        [*ignoring, *LAUNCHER, *command], cwd=ROOT, stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout.readline() == b"[0] started\n"
        launcher.send_signal(signal.SIGHUP)
        launcher.send_signal(signal.SIGINT)
        go.touch()
        assert launcher.stdout.read() == b""
    assert launcher.returncode == 0


def test_a_line_comes_whole_however_long_it_is(tmp_path):
    # The reads that it takes must not each look at all that came before.
    text = "sys.stdout.buffer.write(b'\\xff' + b'x' * 30_000_000 + b'|')"
    said = tmp_path / "said"
    command = [*LAUNCHER, *script(tmp_path, text)]
    with said.open("wb") as stdout:
        subprocess.run(command, cwd=ROOT, stdout=stdout, check=True, timeout=30)
    assert said.read_bytes() == b"[0] \xff" + b"x" * 30_000_000 + b"|\n"


@NEEDS_FULL_DISK
@pytest.mark.parametrize("output", ["closed", "full"])
def test_training_goes_on_when_nothing_can_be_said(tmp_path, output):
    text = f"{MUCH}\npathlib.Path(sys.argv[1]).touch(); sys.exit(3)"
    command = [*LAUNCHER, *script(tmp_path, text, tmp_path / "done")]
    if output == "closed":
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert launcher.stdout.readline().startswith(b"[0] x")
        launcher.stdout.close()
    else:
        with open("/dev/full", "wb") as full:
            launcher = subprocess.Popen(command, cwd=ROOT, stdout=full, stderr=full)
    assert launcher.wait(60) == 3
    assert (tmp_path / "done").exists()


@NEEDS_FULL_DISK
def test_training_goes_on_when_the_disk_is_full(tmp_path):
    (tmp_path / "0.log").symlink_to("/dev/full")
    done = tmp_path / "done"
    command = script(tmp_path, f"{MUCH}\npathlib.Path(sys.argv[1]).touch()", done)
    status, said = run("--log-dir", tmp_path, command=command, processes=1)
    assert status == 0, said
    assert done.exists()
    assert said == (
        f"[launch] {tmp_path}/0.log cannot be written to (No space left on device); "
        "the processes go on, and what it should have held from here on is lost."
    )
