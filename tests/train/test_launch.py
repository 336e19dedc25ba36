"""`python -m train.launch`: starting again."""

import sys

import pytest
from launching import Launched, script

from train import launch
from train.launch import run_folder_of


def run(*arguments, command, processes=2):
    with Launched(*arguments, command=command, processes=processes) as launched:
        return launched.end(30), launched.said


@pytest.mark.parametrize("begun", [True, False])
def test_a_restart_goes_on_with_a_run_that_has_begun(tmp_path, begun):
    """The output of both attempts is printed, or filed where that is asked for."""
    out, logs = tmp_path / "run", tmp_path / "logs"
    logs.mkdir()
    (logs / "1.log").write_text("before\n")
    text = (
        "print(*sys.argv[1:])\n"
        "out = pathlib.Path(sys.argv[2])\n"
        "mark = out / 'failed'\n"
        f"if process == 1 and not mark.exists():\n"
        "    out.mkdir()\n"
        "    mark.touch()\n"
        f"    if {begun}: (out / 'config.json').touch()\n"
        "    sys.exit('went wrong')"
    )
    flags = ("--restarts", "2", *(("--log-dir", logs) if begun else ()))
    status, said = run(*flags, command=script(tmp_path, text, "--out", out))
    assert status == 0, said
    first, again = f"--out {out}", f"--out {out}" + begun * " --resume"
    if begun:
        lines = (logs / "1.log").read_text().splitlines()
        # What a process says on its two streams may swap.
        assert sorted(lines) == sorted(["before", first, "went wrong", again])
        assert (lines[0], lines[-1]) == ("before", again)
    else:
        printed = [line for line in said.splitlines() if line.startswith("[1] ")]
        assert sorted(printed) == [f"[1] {first}", f"[1] {again}", "[1] went wrong"]
    assert [line for line in said.splitlines() if line.startswith("[launch]")] == [
        "[launch] process 1 failed first, with exit status 1: went wrong.",
        f"[launch] restart 1 of 2: python {tmp_path}/script.py {again}",
    ]


def test_restarts_come_to_an_end(tmp_path):
    (tmp_path / "config.json").touch()
    command = script(tmp_path, "sys.exit(4)", f"--out={tmp_path}")
    status, said = run("--restarts", "2", command=command, processes=1)
    assert status == 4
    assert said.count("failed first, with exit status 4") == 3
    assert "--resume" not in said  # the run was there before


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        ("sys.exit('error: there is no corpus.')", 1, "1: error: there is no corpus."),
        (
            "import tyro\ndef main(out: str): ...\ntyro.cli(main, prog='this')",
            2,
            "2: For full helptext, run this --help.",
        ),
    ],
)
def test_a_mistake_is_not_tried_again(tmp_path, text, status, reason):
    command = script(tmp_path, text, "--out", tmp_path, "--stops", "3")
    ended, said = run("--restarts", "2", command=command, processes=1)
    assert ended == status
    assert "restart" not in said
    (last,) = (line for line in said.splitlines() if line.startswith("[launch] "))
    assert last == f"[launch] process 0 failed first, with exit status {reason}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--restarts -1", "must not be negative"),
        ("--restarts 1", "--restarts needs the run's folder"),
    ],
)
def test_restarts_that_cannot_be_made_are_refused(flags, message, monkeypatch, capsys):
    command = ["train.launch", "--processes", "1", *flags.split(), "--", "x.py"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="2"):
        launch.main()
    assert message in capsys.readouterr().err


def test_the_runs_folder_is_read_off_the_command():
    assert str(run_folder_of(["-m", "x", "--out", "a/b", "--y", "3"])) == "a/b"
    assert str(run_folder_of(["x.py", "--out=a/b", "--y"])) == "a/b"
    assert run_folder_of(["x.py", "--outer", "a", "--o", "b", "--out"]) is None
