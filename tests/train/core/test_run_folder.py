"""A folder is a run's own: what is in it is gone on with exactly, or refused."""

import json
import shutil
from dataclasses import replace

import pytest
from runs import STEPS, resume, small_config, steps_of, write_corpus

from train.bert.data import load
from train.bert.pretrain import pretrain
from train.core import metrics_log as record
from train.core import run_folder
from train.core.errors import InputError
from train.core.metrics_log import StepMetrics
from train.core.run_folder import Run
from train.squad import folder as squad_folder


def leave(config):
    """What training leaves in its folder, but for what its checkpoints hold."""
    data = load(config, config.out)
    names = data.corpus, data.vocabulary_name
    run_folder.write(Run(config, *names, config.steps))
    for step in range(1, config.steps + 1):
        record.append(config.out, StepMetrics(step, 1.0, "warmup", 1, 1, 0, 0.1, 1.0))
    (config.out / "checkpoints" / str(config.steps)).mkdir(parents=True)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "corpus").mkdir()
    corpus = write_corpus(tmp_path / "corpus")
    return replace(small_config(corpus), out=tmp_path / "run")


@pytest.fixture
def adam(config):
    """Plain Adam's part of the run."""
    out = config.out / "adam"
    return replace(config, optimizer="adam", freeze_step=None, compare=False, out=out)


@pytest.fixture
def run(config):
    leave(config)
    return config.out


def stored(folder):
    return json.loads((folder / "config.json").read_text())


def test_an_output_folder_that_holds_a_run_is_refused(run, config):
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="already holds a run; go on with it by --res"):
        pretrain(config)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_an_output_folder_with_adams_place_taken_is_refused(config, adam):
    leave(replace(adam, learning_rate=0.5))
    with pytest.raises(InputError, match="run/adam already holds a run"):
        pretrain(config)
    assert not (config.out / "config.json").exists()


@pytest.mark.parametrize(
    "changes", [{"learning_rate": 0.5}, {"seed": 1}, {"steps": 6}, {"corpus": ()}]
)
def test_another_runs_adam_is_not_gone_on_with(run, adam, changes, tmp_path):
    if "corpus" in changes:
        files = tuple(sorted((tmp_path / "corpus").iterdir()))
        changes = {"corpus": files[:4]}
    leave(replace(adam, **changes))
    before = (run / "adam" / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="run/adam holds another run, of other flags"):
        resume(run, "--steps", str(STEPS + 2))
    assert (run / "adam" / "metrics.jsonl").read_bytes() == before
    assert stored(run)["until"] == STEPS
    assert not (run / "training.png").exists()


def test_adam_of_the_same_flags_is_the_runs_own(run, adam):
    # They are the same however many workers train, and wherever the folder is.
    leave(replace(adam, workers=4, log_every=7, out=run.parent / "elsewhere"))
    shutil.move(run.parent / "elsewhere", adam.out)
    with pytest.raises(InputError, match="run/checkpoints/8 is damaged"):
        resume(run)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seq", "32"], "was started with --seq 16, not 32; leave --seq out"),
        (["--model", "mini"], "was started with --model tiny, not mini"),
        (["--vocab", "v.txt"], "was started with --vocab None, not "),
        (["--steps", "5"], "goes to step 8; leave out --steps 5"),
        (["--workers", "3"], "--batch 8 cannot be shared equally by 3 workers"),
    ],
)
def test_flags_that_contradict_a_run_are_refused(run, flags, message):
    with pytest.raises(InputError) as caught:
        resume(run, *flags)
    assert message in str(caught.value)
    assert len(steps_of(run)) == STEPS


def test_going_on_with_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"there is no run in .* leave out --resume"):
        resume(tmp_path)


def test_going_on_with_damage_is_refused(run):
    (run / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json is damaged"):
        resume(run)


def test_a_damaged_line_of_the_metrics_is_named(run):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\0\0\xff\n")
    with pytest.raises(InputError, match=r"line 9 of .*metrics\.jsonl is damaged"):
        record.read(run)


def test_a_run_of_another_command_is_refused(run):
    with pytest.raises(InputError, match=r"a run of train.pretrain; give one of train"):
        squad_folder.read(run)


def test_word_pieces_go_where_they_are_asked_for(run, tmp_path):
    flags = ["--steps", str(STEPS + 2), "--tokens", str(tmp_path / "tokens")]
    with pytest.raises(InputError, match="checkpoints/8 is damaged"):
        resume(run, *flags)
    assert len(list((tmp_path / "tokens").iterdir())) == 1


def test_word_pieces_that_are_damaged_are_made_again(run, config):
    (file,) = run.glob("tokens/*/training/pieces.npy")
    for damage in (file.read_bytes()[:-4], b"", None):
        if damage is None:
            file.unlink()
        else:
            file.write_bytes(damage)
        with pytest.raises(InputError, match="delete the folder") as caught:
            resume(run)
        folder = str(caught.value).split("delete the folder ")[1].split(",")[0]
        assert folder == str(file.parent.parent)
    shutil.rmtree(folder)
    with pytest.raises(InputError, match="checkpoints/8 is damaged"):
        resume(run, "--steps", str(STEPS + 2))
    assert file.exists()


def test_going_on_without_a_checkpoint_is_refused(run):
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InputError, match="there is no checkpoint in"):
        resume(run)


def test_a_goal_is_kept_only_when_it_can_be_gone_on_to(run):
    # The checkpoint is an empty folder.
    with pytest.raises(InputError, match="checkpoints/8 is damaged"):
        resume(run, "--steps", str(STEPS + 2))
    assert stored(run)["until"] == STEPS


def test_a_finished_run_that_is_started_again_by_the_launcher_is_finished(
    run, adam, monkeypatch
):
    leave(adam)
    monkeypatch.setenv("TRAIN_RESTART_COUNT", "1")
    resume(run)
    assert stored(run)["until"] == STEPS
    assert (run / "training.png").exists()


def test_a_goal_that_is_reached_is_reached_for_who_gives_it_again(run, config, adam):
    goal = STEPS + 2
    leave(adam)
    for own in (config, adam):
        (own.out / "checkpoints" / str(goal)).mkdir()
        run_folder.write(replace(run_folder.read(own.out), until=goal))
    resume(run, "--steps", str(goal))
    assert stored(run)["until"] == goal


def test_a_text_that_has_moved_is_the_same_text(run, tmp_path):
    moved = tmp_path / "moved"
    (tmp_path / "corpus").rename(moved)
    with pytest.raises(InputError, match="checkpoints/8 is damaged"):
        resume(run, "--steps", "10", "--corpus", *map(str, sorted(moved.iterdir())))


def test_going_on_with_another_text_is_refused(run, tmp_path):
    (tmp_path / "corpus" / "0.txt").write_text("The sun was another one.")
    with pytest.raises(InputError, match="the corpus is not the one that the run"):
        resume(run)
