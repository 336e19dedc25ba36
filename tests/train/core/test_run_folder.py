"""A folder is a run's own: what is in it is gone on with, or refused."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from train.core import lock, run_folder
from train.core.errors import InputError
from train.core.flags import Changeable, TrainingFlags
from train.core.processes.watchdog import Watchdog
from train.core.run_folder import (
    Run,
    begun,
    check_contents,
    check_free,
    contents_name,
    read,
    run_of,
    write,
)

KEPT = '{"command": "train.%s", "flags": %s, "contents": {}, "until": 1}'


@dataclass(frozen=True, kw_only=True)
class Flags(TrainingFlags):
    """A task's."""

    steps: Changeable[int] = 8
    text: Path | None = None


@pytest.fixture
def run(tmp_path):
    flags = Flags(out=tmp_path / "run", text=tmp_path / "text")
    return Run("train.task", flags, {"corpus": "a", "vocabulary": "b"}, 8)


def test_a_run_is_read_as_it_was_written_wherever_it_has_moved(run, tmp_path):
    write(run)
    assert read(run.flags.out, "train.task", Flags) == run
    values = json.loads((run.flags.out / "config.json").read_text())
    assert values.keys() == {"command", "flags", "contents", "until"}
    moved = run.flags.out.rename(tmp_path / "moved")
    elsewhere = replace(run, flags=replace(run.flags, out=moved))
    assert read(moved, "train.task", Flags) == elsewhere


@pytest.mark.parametrize("taken", ["config.json", "metrics.jsonl", "checkpoints"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path, taken):
    check_free(tmp_path)
    check_free(tmp_path / "new")
    (tmp_path / taken).touch()
    with pytest.raises(InputError, match="already holds a run; go on with it by --res"):
        check_free(tmp_path)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="is a file; give a folder"):
        check_free(tmp_path / "run")


@pytest.mark.parametrize("out", ["file/run", "link", "n" * 300])
def test_a_folder_that_cannot_be_made_is_refused(run, tmp_path, out):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"cannot be written to \(.+\); mend that, or"):
        write(replace(run, flags=replace(run.flags, out=tmp_path / out)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"there is no run in .* leave out --resume"),
        ("{", r"config.json is damaged"),
        ("[]", r"config.json is damaged"),
        ('{"command": "train.task", "flags": {"x": 1}}', r"config.json is damaged"),
        (KEPT % ("task", '{"x": 1}'), r"config.json is damaged"),
        (KEPT % ("task", '{"warmup_bits": null}'), r"config.json is damaged"),
        (KEPT % ("other", "{}"), r"a run of train.other; give one of train.task"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, text, message):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read(tmp_path, "train.task", Flags)


def test_a_killed_writer_leaves_the_run_before(run, monkeypatch):
    write(run)
    monkeypatch.setattr(Path, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(replace(run, until=9))
    monkeypatch.undo()
    assert read(run.flags.out, "train.task", Flags).until == 8


def test_other_contents_are_refused_by_name(run):
    check_contents(run, {"corpus": "a"})
    with pytest.raises(InputError, match=r"the corpus is not the one .*; find it, or"):
        check_contents(run, {"corpus": "b"}, {"corpus": "find it"})
    assert contents_name("a", b"b") == contents_name(b"a", "b")
    assert contents_name("a", "b") != contents_name("ab")


def test_processes_that_are_given_other_flags_are_refused(run, monkeypatch):
    compared = []
    monkeypatch.setattr(run_folder, "check_agreed", compared.append)
    with Watchdog(60) as watchdog:
        for every in (7, 8):
            given = replace(run.flags, checkpoint_every=every, resume=True)
            with begun([run], given, lambda _: None, watchdog):
                pass
    names, one, again, other = compared
    assert names == again
    assert [name for name in one if one[name] != other[name]] == ["--checkpoint-every"]
    assert one.keys() > run.contents.keys()


def test_a_run_that_begins_says_whose_its_folder_is(run):
    written = []
    inner = replace(run, flags=replace(run.flags, out=run.flags.out / "adam"))
    with Watchdog(60) as watchdog:
        with begun([run, inner], run.flags, written.append, watchdog):
            assert written == [run.flags.out]
            assert run_folder.exists(inner.flags.out)
            assert (inner.flags.out / lock.FILE).exists()
        # What is there stays until the run has really gone on.
        resumed = replace(run.flags, resume=True)
        with begun([replace(run, until=10)], resumed, written.append, watchdog):
            pass
    assert read(run.flags.out, "train.task", Flags).until == 8


def test_a_folder_is_a_runs_own_from_its_beginning_to_its_end(run):
    def begin(flags):
        with Watchdog(60) as watchdog, begun([run], flags, lambda _: None, watchdog):
            return (run.flags.out / lock.FILE).exists()

    found_free = run_of(run.flags, run.command, run.contents, run.until)
    assert found_free == run
    assert begin(run.flags)
    assert not (run.flags.out / lock.FILE).exists()
    # Another has come and gone while its data were read.
    with pytest.raises(InputError, match="already holds a run"):
        begin(found_free.flags)
    resumed = replace(run.flags, resume=True)
    assert begin(resumed)
    assert run_of(resumed, run.command, run.contents, 9) == run
    with pytest.raises(InputError, match="the corpus is not the one that"):
        run_of(resumed, run.command, {**run.contents, "corpus": "c"}, 9)
    with pytest.raises(InputError, match="was started with --seed 0, not 1"):
        run_of(replace(resumed, seed=1), run.command, run.contents, 9)
