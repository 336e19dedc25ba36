"""Pre-training: what a run leaves behind, and that it goes on exactly."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from launching import arrays_of
from runs import (
    FREEZE,
    SMALL,
    STEPS,
    resume,
    small_config,
    steps_of,
    train,
    without_speed,
    write_corpus,
)

from train.bert.data import load
from train.bert.objective import init_params
from train.bert.pretrain import MODULE, parse, pretrain
from train.core import metrics_log, run_folder
from train.core.errors import InputError
from train.core.metrics_log import StepMetrics
from train.core.run_folder import Run
from train.core.task import identity
from train.data.vocabulary import SPECIAL, read_vocabulary, write_vocabulary

LONG = 4  # steps of the second phase
LAST = STEPS + LONG
FROZEN = {"first": range(FREEZE + 1, STEPS + 1), "second": range(STEPS + 4, LAST + 1)}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def config(corpus):
    """Two phases, in the way that is furthest from the defaults."""
    return replace(
        small_config(corpus),
        workers=2,
        weight_decay=0.0,
        long_seq=32,
        long_steps=LONG,
        long_batch=4,
        long_accumulate=2,
        long_warmup_steps=2,
        long_freeze_step=3,
        whole_words=True,
        dtype="bfloat16",
        pre_norm=True,
        remat="layer",
    )


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """A run that was not interrupted, and a copy of it as a kill would leave it.

    SIGKILL leaves on the disk what is there at the time, and no more.
    """
    base = tmp_path_factory.mktemp("runs")
    out, append = base / "run", metrics_log.append

    def append_and_copy(folder, metrics):
        append(folder, metrics)
        if folder == out and metrics.step == STEPS + 3 and "loss" in vars(metrics):
            shutil.copytree(out, base / "killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_log, "append", append_and_copy)
        train(replace(config, out=out))
    return out


def test_a_run_leaves_what_its_folder_is_for(finished, config):
    names = "config.json vocab.txt checkpoints metrics.jsonl training.png tokens adam"
    assert {path.name for path in finished.iterdir()} == set(names.split())
    assert "[MASK]" in (finished / "vocab.txt").read_text().splitlines()
    values = json.loads((finished / "config.json").read_text())
    assert (values["flags"]["seq"], values["until"]) == (config.seq, LAST)
    adams = json.loads((finished / "adam" / "config.json").read_text())
    assert adams["flags"]["optimizer"] == "adam"
    assert adams["contents"] == values["contents"]
    for folder in (finished, finished / "adam"):
        lines = metrics_log.read(folder)
        assert [x["step"] for x in steps_of(folder)] == list(range(1, LAST + 1))
        evaluated = [line["step"] for line in lines if "eval_loss" in line]
        assert evaluated == list(range(4, LAST + 1, 4))


def test_each_phase_is_frozen_and_counted_by_itself(finished):
    lines = steps_of(finished)
    stages = {line["step"]: line["stage"] for line in lines}
    compressed = {step for step, stage in stages.items() if stage != "warmup"}
    assert compressed == {*FROZEN["first"], *FROZEN["second"]}
    rates = {line["stage"]: line["sent_bytes"] for line in lines}
    size = sum(
        x.size for k, x in arrays_of(finished, LAST).items() if k.startswith("params.")
    )
    # A ring's all-reduce of float32 between two workers, and some scalars.
    assert 4 * size < rates["warmup"] < 1.1 * 4 * size
    assert rates["warmup"] > 10 * rates["compressed"]
    # The loss of the first step with long sequences is one of a model that has learnt.
    assert abs(lines[STEPS]["loss"] - lines[STEPS - 1]["loss"]) < 0.5


def test_plain_adam_is_trained_on_the_same_samples(finished):
    # Before the freeze they are the same algorithm, by two programs.
    ours, adams = (steps_of(folder) for folder in (finished, finished / "adam"))
    for one, other in zip(ours[: FREEZE + 1], adams, strict=False):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-2)
    assert ours[-1]["loss"] != adams[-1]["loss"]
    assert {line["stage"] for line in adams} == {"every"}


def test_positions_that_wait_for_the_second_phase_need_no_mask(finished, config):
    name = "params.bert.embeddings.position.embedding"
    before = init_params(
        replace(SMALL, vocab_size=len(read_vocabulary(finished / "vocab.txt"))), 0
    )["bert"]["embeddings"]["position"]["embedding"][config.seq :]
    after = arrays_of(finished, LAST)[name][config.seq :]
    moved = np.abs(after - before)
    assert np.mean(moved > config.learning_rate / 10) > 0.9
    # No coordinate moves by more than 3 learning rates a step.
    assert moved.max() <= LAST * 3 * config.learning_rate


def test_a_killed_run_goes_on_bit_by_bit(finished, tmp_path, capsys):
    folder = shutil.copytree(finished.parent / "killed", tmp_path / "run")
    shutil.copytree(finished / "adam", folder / "adam", dirs_exist_ok=True)
    assert steps_of(folder)[-1]["step"] == STEPS + 3
    resume(folder)
    assert "times fewer bytes" in capsys.readouterr().out
    for arm in ("", "adam"):
        ours, theirs = (arrays_of(run / arm, LAST) for run in (folder, finished))
        assert ours.keys() == theirs.keys()
        assert not [k for k in ours if ours[k].tobytes() != theirs[k].tobytes()]
        lines = [metrics_log.read(run / arm) for run in (folder, finished)]
        assert without_speed(lines[0]) == without_speed(lines[1])
    assert (folder / "training.png").exists()


def test_a_text_that_is_too_small_is_refused(config, tmp_path):
    config, corpus = replace(config, out=tmp_path / "run"), tmp_path / "corpus"
    corpus.mkdir()
    for letter in "abcdefgh":
        (corpus / f"{letter}.txt").write_text(f"word{letter}")
    with pytest.raises(InputError, match="have two word pieces together; give more"):
        pretrain(replace(config, corpus=(corpus,)))
    for letter in "abcdef":
        (corpus / f"{letter}.txt").write_text("1 2 3 4 " * 1250 + "\n\n7")
    (corpus / "g.txt").write_text("One is one. Two is two.")
    with pytest.raises(InputError, match="the corpus makes 2 documents"):
        pretrain(replace(config, corpus=(corpus,)))
    assert not run_folder.exists(config.out)
    run_folder.check_free(config.out)


def test_a_run_keeps_its_vocabulary_and_a_new_one_takes_what_is_given(
    config, tmp_path, capsys
):
    config = replace(config, out=tmp_path)
    given, kept = tmp_path / "given.txt", tmp_path / "vocab.txt"
    write_vocabulary(given, (*SPECIAL, "sun", "moon"))
    write_vocabulary(kept, (*SPECIAL, "moon", "sun"))
    with_given = replace(config, vocab=given, vocab_size=None)
    contents, new = load(with_given)
    assert "% of the text is unknown to this vocabulary" in capsys.readouterr().out
    assert new.vocabulary == read_vocabulary(given)
    assert "star" in load(config)[1].vocabulary
    said = capsys.readouterr().out
    assert "[UNK]" not in said
    pieces = len(load(config)[1].vocabulary)
    fewer = f"the corpus makes {pieces} word pieces, fewer than --vocab-size 100"
    assert said.splitlines() == [fewer]
    run = Run(MODULE, with_given, contents, until=1)
    with pytest.raises(InputError, match="the vocabulary is not the one that the run"):
        load(with_given, run)
    write_vocabulary(kept, new.vocabulary)
    given.unlink()
    assert load(with_given, run)[1].vocabulary == new.vocabulary


def leave(config, until=STEPS):
    """A folder as training leaves it, but for what its checkpoints hold."""
    contents, _ = load(config)
    run_folder.write(Run(MODULE, config, contents, until))
    for step in range(1, STEPS + 1):
        line = StepMetrics(step, 1.0, "warmup", 1, 1, 0, 0.1, 1.0, {})
        metrics_log.append(config.out, line)
    (config.out / "checkpoints" / str(until)).mkdir(parents=True)


@pytest.fixture
def first(corpus, tmp_path):
    """The flags of a run that has ended."""
    text = shutil.copytree(corpus, tmp_path / "corpus")
    config = replace(small_config(text), out=tmp_path / "run")
    leave(config)
    return config


@pytest.fixture
def adam(first):
    """Those of plain Adam's part of it, which has not begun."""
    out = first.out / "adam"
    return replace(first, optimizer="adam", freeze_step=None, compare=False, out=out)


def until(folder):
    return json.loads((folder / "config.json").read_text())["until"]


# That is as far as a run gets whose checkpoint is an empty folder.
goes_on = pytest.raises(InputError, match=r"run/checkpoints/\d+ is damaged")


def test_a_folder_that_is_taken_is_refused(first, adam):
    with pytest.raises(InputError, match="run already holds a run"):
        pretrain(first)
    (first.out / "config.json").rename(first.out / "other.json")
    shutil.rmtree(first.out / "checkpoints")
    (first.out / "metrics.jsonl").unlink()
    leave(adam)
    with pytest.raises(InputError, match="run/adam already holds a run"):
        pretrain(first)
    assert not (first.out / "config.json").exists()


def test_fewer_steps_than_a_run_has_are_refused(first):
    with pytest.raises(InputError, match="goes to step 8; leave out --steps 5"):
        resume(first.out, "--steps", "5")
    assert len(steps_of(first.out)) == STEPS


def test_a_run_that_had_too_little_memory_goes_on_with_less(first):
    with goes_on:
        resume(first.out, "--remat", "layer", "--steps", str(STEPS + 2))
    kept = identity(replace(SMALL, remat="layer"), "adam")
    assert kept == identity(SMALL, "adam")
    assert kept != identity(replace(SMALL, num_layers=2), "adam")
    assert kept != identity(SMALL, "onebit_adam")


def test_the_first_phase_of_a_run_stays_as_long_as_it_was(first):
    flags = replace(first, long_seq=32)
    run_folder.write(
        replace(run_folder.read(first.out, MODULE, type(first)), flags=flags)
    )
    resumed = ["--resume", "--out", str(first.out)]
    with pytest.raises(InputError, match="was started with --steps 8, not 9"):
        parse([*resumed, "--steps", "9"])
    assert parse([*resumed, "--long-steps", "5"]).training.total_steps == STEPS + 5


def test_a_text_that_has_moved_is_the_same_text(first, tmp_path):
    moved = (tmp_path / "corpus").rename(tmp_path / "moved")
    flags = ["--steps", "10", "--tokens", str(tmp_path / "tokens")]
    with goes_on:
        resume(first.out, *flags, "--corpus", *map(str, sorted(moved.iterdir())))
    # Word pieces go where they are asked for.
    assert len(list((tmp_path / "tokens").iterdir())) == 1
    # A goal is kept only when it can be gone on to.
    assert until(first.out) == STEPS
    (moved / "0.txt").write_text("The sun was another one.")
    with pytest.raises(InputError, match="the corpus is not the one that the run"):
        resume(first.out, "--corpus", str(moved))


def test_a_finished_run_tells_how_to_go_on(first, adam, capsys):
    leave(adam)
    with goes_on:
        resume(first.out)
    said = capsys.readouterr().out
    assert f"all {STEPS} steps are done; to go on" in said
    about = r"word pieces, 8 documents of [1-9],\d{3} tokens, 2 of them held out, 8 wor"
    assert re.search(about, said)
    assert "give more --steps" in said
    assert until(first.out) == STEPS


def test_a_goal_that_is_reached_is_reached_for_who_gives_it_again(first, adam):
    goal = STEPS + 2
    for config in (first, adam):
        shutil.rmtree(config.out, ignore_errors=True)
    for config in (first, adam):
        leave(config, goal)
    with goes_on:
        resume(first.out, "--steps", str(goal))
    assert until(first.out) == goal
