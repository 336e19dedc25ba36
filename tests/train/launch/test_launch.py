"""The launcher: several processes that start, speak and end together."""

import os
import signal
import subprocess
import sys
import time

import pytest
from launching import ROOT, Launched, is_running

from train.core.errors import InputError
from train.launch.command import Launch, check, environments, run_folder_of
from train.launch.output import cause_in

NEEDS_PROC = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc"
)


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
    status, said = run(
        "--devices-per-process",
        "2",
        command=script(
            "print(os.environ['JAX_NUM_PROCESSES'], os.environ['JAX_NUM_CPU_DEVICES'],"
            "os.environ['JAX_LOCAL_DEVICE_IDS'], sys.argv[1:])\n"
            "print('warned', file=sys.stderr)",
            "--out",
            "x",
        ),
        processes=3,
    )
    assert status == 0
    assert sorted(said.splitlines()) == [
        "[0] 3 2 0,1 ['--out', 'x']",
        "[0] warned",
        "[1] 3 2 2,3 ['--out', 'x']",
        "[1] warned",
        "[2] 3 2 4,5 ['--out', 'x']",
        "[2] warned",
    ]


def test_all_processes_have_the_same_coordinator_of_this_machine():
    first, second = environments(2, 1, 1234)
    assert first["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:1234"
    assert {k for k in first if first[k] != second[k]} == {
        "JAX_PROCESS_ID",
        "JAX_LOCAL_DEVICE_IDS",
    }


def test_a_bar_is_not_drawn_again_and_again_into_a_file(script):
    text = "sys.stderr.write('\\r10%\\r20%\\r30%\\n')"
    status, said = run(command=script(text), processes=1)
    assert (status, said) == (0, "[0] 30%")


def test_output_is_filed_by_process(script, tmp_path):
    logs = tmp_path / "logs"
    text = "print('hello', process); sys.exit('went wrong' if process else 0)"
    status, said = run("--log-dir", logs, command=script(text))
    assert (logs / "0.log").read_text() == "hello 0\n"
    assert (logs / "1.log").read_text() == "hello 1\nwent wrong\n"
    assert status == 1
    assert said == ("[launch] process 1 failed first, with exit status 1: went wrong.")


@NEEDS_PROC
def test_a_failure_ends_all_and_is_named(script):
    text = (
        "if process == 1: pathlib.Path(sys.argv[1]).touch()\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)\n"
        "if process == 1: print('a sentence', file=sys.stderr); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    command = script(text)
    ready, go = (command[0].with_name(name) for name in ("ready", "go"))
    with Launched("--grace", "0.5", command=[*command, ready, go]) as launched:
        launched.until(ready.exists)
        launched.pids()
        go.touch()
        assert launched.end(20) == 3
        launched.assert_nothing_is_left()
    assert launched.lines == [
        "[1] a sentence",
        "[launch] process 1 failed first, with exit status 3: a sentence; still "
        "running then: process 0.",
    ]


def test_a_failure_is_seen_beside_a_process_that_never_stops_printing(script):
    text = (
        "if process == 1: time.sleep(0.3); sys.exit(4)\nwhile True: print('x' * 10_000)"
    )
    status, said = run("--grace", "0.5", command=script(text))
    assert status == 4
    assert said.splitlines()[-1].startswith("[launch] process 1 failed first")


def test_a_line_comes_whole_however_long_it_is(script):
    # Its 460 reads must not each look at all that came before.
    text = "sys.stdout.write('x' * 30_000_000 + '|')"
    status, said = run(command=script(text), processes=1)
    assert (status, said) == (0, "[0] " + "x" * 30_000_000 + "|")


LOST = "F1120 14:45:23.347257 3324 client.h:80] Terminating process: UNAVAILABLE: 1"


@pytest.mark.parametrize(
    "ending",
    ["sys.exit(75)", f"print({LOST!r}, file=sys.stderr); os.abort()"],
    ids=["a sentence", "JAX's own end"],
)
def test_who_ends_for_another_is_not_the_first(script, ending):
    text = (
        f"if process == 0: {ending}\n"
        "time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)"
    )
    status, said = run(command=script(text))
    assert status == 128 + signal.SIGKILL
    assert said.splitlines()[-1] == (
        "[launch] process 1 failed first, killed by SIGKILL, as a system sends when "
        "memory runs out."
    )


def test_an_abort_of_its_own_is_the_first_failure(script):
    text = "if process == 1: os.abort()\ntime.sleep(0.3); sys.exit('peer closed')"
    status, said = run(command=script(text))
    assert status == 128 + signal.SIGABRT
    last = said.splitlines()[-1]
    assert last == "[launch] process 1 failed first, killed by SIGABRT."


@NEEDS_PROC
def test_a_process_that_hangs_is_named(script):
    text = (
        "if process == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(0.5); print('error: waited', file=sys.stderr); sys.exit(75)"
    )
    status, said = run("--grace", "0.5", command=script(text))
    assert status == 75
    assert said.splitlines()[-1] == (
        "[launch] process 0 gave up waiting, with exit status 75: error: waited; still "
        "running then: process 1 (stopped)."
    )


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
        assert launched.said == f"[launch] ended by {number.name}."
        time.sleep(0.05)
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
    status, said = run(
        "--restarts", "2", command=script("sys.exit(4)", f"--out={tmp_path}")
    )
    assert status == 4
    assert said.count("failed first, with exit status 4") == 3


def test_a_mistake_that_was_named_is_not_tried_again(script, tmp_path):
    text = "sys.exit('error: there is no corpus; give --corpus.')"
    status, said = run("--restarts", "2", command=script(text, "--out", tmp_path))
    assert status == 1
    assert "restart" not in said


def test_what_an_earlier_attempt_said_is_no_cause_of_a_later_failure(script, tmp_path):
    text = (
        "if os.environ['TRAIN_RESTART_COUNT'] == '0': sys.exit('the first cause')\n"
        "os._exit(9)"
    )
    logs = tmp_path / "logs"
    _, said = run(
        *("--restarts", "1", "--log-dir", logs),
        command=script(text, "--out", tmp_path),
        processes=1,
    )
    assert said.splitlines()[0].endswith("with exit status 1: the first cause.")
    assert said.splitlines()[-1].endswith("with exit status 9.")
    assert (logs / "0.log").read_text() == "the first cause\n"


def test_logs_that_cannot_be_kept_are_refused(script, tmp_path):
    (tmp_path / "file").touch()
    status, said = run("--log-dir", tmp_path / "file", command=script("pass"))
    assert status == 1
    assert said.startswith("error: --log-dir")
    assert "\n" not in said


def test_training_goes_on_when_nobody_reads_along(script, tmp_path):
    done = tmp_path / "done"
    text = "for i in range(2000): print('x' * 100)\npathlib.Path(sys.argv[1]).touch()"
    own = [sys.executable, "-m", "train.launch", "--processes", "1", "--"]
    launcher = subprocess.Popen(
        [*own, *map(str, script(text, done))], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert launcher.stdout.readline().startswith(b"[0] x")
    launcher.stdout.close()
    assert launcher.wait(30) == 0
    assert done.exists()


@pytest.mark.parametrize(
    ("flags", "command", "message"),
    [
        (Launch(0), ["x.py"], "--processes must be at least 1"),
        (Launch(1, 0), ["x.py"], "--devices-per-process must be at least 1"),
        (Launch(1, restarts=-1), ["x.py"], "must not be negative"),
        (Launch(1), [], "there is no command; give one after --"),
        (Launch(1, restarts=1), ["x.py"], "--restarts needs the run's folder"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(flags, command, message):
    with pytest.raises(InputError, match=message):
        check(flags, command)


def test_the_runs_folder_is_read_off_the_command():
    assert str(run_folder_of(["x.py", "--out", "a/b"])) == "a/b"
    assert str(run_folder_of(["x.py", "--out=a/b", "--y"])) == "a/b"
    assert run_folder_of(["x.py", "--out"]) is None


def test_xlas_fatal_errors_are_told_without_the_stack():
    lines = [
        "E1120 14:45:23.347117    3324 agent.cc:289] Polled an error.",
        "F1120 14:45:23.347257    3324 client.h:80] Terminating process because the "
        "service detected fatal errors. absl::Status: UNAVAILABLE: unhealthy tasks:",
        "1",
        "The tasks have crashed.",
        "",
        "RPC: /xla.Service/Poll [type='']",
        "*** Check failure stack trace: ***",
        "    @     0x7fdfc8240634  absl::LogMessage::SendToLog()",
    ]
    assert cause_in(lines) == (
        "UNAVAILABLE: unhealthy tasks: 1 The tasks have crashed."
    )
    assert cause_in([*lines[:1], ""]) == lines[0].replace("    ", " ")
    assert cause_in([]) == ""
