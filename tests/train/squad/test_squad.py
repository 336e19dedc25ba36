"""Fine-tuning for spans learns, resumes exactly, and says what it cannot use."""

import dataclasses
import json
from pathlib import Path

import chex
import numpy as np
import pytest
from fine_tuning import CONTEXTS, run
from launching import Launched
from runs import steps_of, without_speed

from models import huggingface
from train.core import metrics_log
from train.core.errors import InputError
from train.core.processes.watchdog import Watchdog
from train.data.model_folder import TOKENIZER
from train.data.vocabulary import SPECIAL, write_vocabulary
from train.squad import answer as answer_module
from train.squad.command import parse
from train.squad.config import check
from train.squad.dataset import read_squad
from train.squad.initial_weights import read_weights
from train.squad.scores import evaluate


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "onebit_adam"])
def test_a_small_model_learns_its_answers(files, optimizer):
    scores = run(
        files,
        optimizer=optimizer,
        freeze_step=None,
        steps=160,
        dropout=0.0,
        checkpoint_every=160,
        log_every=10,
    )
    assert scores["all"].f1 >= 90
    predictions = json.loads((files.out / "predictions.json").read_text())
    assert evaluate(read_squad(files.train), predictions) == scores
    assert json.loads((files.out / "scores.json").read_text())["all"]["total"] == 6
    stages = [line["stage"] for line in metrics_log.read(files.out)]
    compressed = stages.count("compressed")
    assert compressed == (12 if optimizer == "onebit_adam" else 0)  # of 16, freeze 25 %
    # What was learnt is there for others to use, and to go on from.
    _, params = huggingface.read(files.out / "model", "BertForQuestionAnswering")
    again = read_weights(files.out / "model")
    assert not again.cased
    of_run = read_weights(files.out)
    chex.assert_trees_all_equal(of_run.params, params)
    (files.out / "model" / TOKENIZER).write_text('{"do_lower_case": false}')
    assert read_weights(files.out / "model").cased
    chex.assert_trees_all_equal(again.params, params)


def test_questions_without_answers_are_scored_apart(files, monkeypatch):
    waits = []
    monkeypatch.setattr(Watchdog, "expect", lambda self, what: waits.append(what))
    content = json.loads(files.train.read_text())
    for paragraph in content["data"][0]["paragraphs"]:
        for question in paragraph["qas"]:
            question["is_impossible"] = question["question"] == "Where?"
            if question["is_impossible"]:
                question["answers"] = []
    files.train.write_text(json.dumps({**content, "version": "v2.0"}))
    plain = {"optimizer": "adam", "freeze_step": None, "steps": 2, "batch": 4}
    scores = run(files, **plain)
    assert {name: score.total for name, score in scores.items()} == {
        "all": 6,
        "answerable": 3,
        "unanswerable": 3,
    }
    odds = json.loads((files.out / "null_odds.json").read_text())
    predictions = json.loads((files.out / "predictions.json").read_text())
    assert {name for name, text in predictions.items() if not text} == {
        name for name, value in odds.items() if value > 0
    }
    nothing = run(files, **plain, resume=True, null_threshold=min(odds.values()) - 1)
    assert nothing["all"] == (50, 50, 6)
    kept = json.loads((files.out / "scores.json").read_text())
    assert kept["unanswerable"] == {"exact": 100, "f1": 100, "total": 3}
    # Each has its own time, and a compilation any.
    answering = [
        "",
        *(f"the answers to windows {part}" for part in ("0 to 3", "4 to 5")),
    ]
    assert waits[-4:] == [*answering, ""]


class Killed(BaseException):
    """An error that no code handles."""


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_exactly(files, tmp_path, monkeypatch):
    run(files)
    expected = huggingface.read_tensors(files.out / "model" / "model.safetensors")
    lines = metrics_log.read(files.out)
    stages = [line["stage"] for line in lines]
    assert stages == ["warmup"] * 3 + ["compressed"] * 3
    names = "config.json vocab.txt checkpoints metrics.jsonl training.png model"
    names += " predictions.json scores.json " + TOKENIZER
    assert {path.name for path in files.out.iterdir()} == set(names.split())
    other = dataclasses.replace(files, out=tmp_path / "other")

    def kill(folder, metrics, append=metrics_log.append):
        if metrics.step == 5:
            raise Killed
        append(folder, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(metrics_log, "append", kill)
        with pytest.raises(Killed):
            run(other)
    assert [line["step"] for line in steps_of(other.out)] == [1, 2, 3, 4]
    with pytest.raises(InputError, match="already holds a run"):
        run(other)
    files.train.write_text(files.train.read_text() + " ")
    with pytest.raises(InputError, match="the training file is not the one"):
        run(other, resume=True)
    files.train.write_text(files.train.read_text().rstrip())
    # The folder remembers everything else, the word pieces too.
    files.vocab.unlink()
    goes_on = ["--resume", "--out", str(other.out), "--log-every", "1"]
    moved = files.train.rename(tmp_path / "moved.json")
    run(parse([*goes_on, "--train", str(moved)]).training)
    assert parse(goes_on).training.train == moved
    again = huggingface.read_tensors(other.out / "model" / "model.safetensors")
    assert again.keys() == expected.keys()
    for name, value in expected.items():
        assert again[name].tobytes() == value.tobytes(), name
    assert without_speed(metrics_log.read(other.out)) == without_speed(lines)


@pytest.mark.slow
def test_two_processes_train_and_answer_as_one_does(files, tmp_path):
    flags = (
        f"--train {files.train} --vocab {files.vocab} --batch 6 --seq 32 --steps 6 "
        "--freeze-step 3 --learning-rate 1e-3 --log-every 1"
    ).split()
    found = []
    for name, processes in (("one", 1), ("two", 2)):
        out = tmp_path / name
        command = ["-m", "train.squad", *flags, "--workers", 2, "--out", out]
        with Launched(command=command, processes=processes) as launched:
            assert launched.end() == 0, launched.said
        lines = without_speed(metrics_log.read(out))
        model = (out / "model" / "model.safetensors").read_bytes()
        found.append((lines, model, (out / "predictions.json").read_text()))
    assert [line["stage"] for line in found[0][0]].count("compressed") == 3
    assert found[0] == found[1]


def test_answers_that_are_whole_in_no_window_are_told_of(files, capsys):
    content = json.loads(files.train.read_text())
    asked = [p["qas"][0] for p in content["data"][0]["paragraphs"]]
    asked[0]["answers"] = [{"text": CONTEXTS[0], "answer_start": 0}]
    files.train.write_text(json.dumps(content))
    with pytest.raises(InputError, match="--warmup-steps"):  # after the check
        run(files, seq=12, warmup_steps=6)
    assert "1 of 6 answers are whole in no window" in capsys.readouterr().out
    content["data"][0]["paragraphs"] = content["data"][0]["paragraphs"][:1]
    content["data"][0]["paragraphs"][0]["qas"] = asked[:1]
    files.train.write_text(json.dumps(content))
    with pytest.raises(InputError, match="no answer is whole in a window"):
        run(files, seq=12)


def test_a_vocabulary_that_does_not_know_the_text_is_told_of(files, capsys):
    write_vocabulary(files.vocab, [*SPECIAL, "red", "fox", "who", "?"])
    with pytest.raises(InputError, match="--warmup-steps"):
        run(files, warmup_steps=6)
    known, pieces = 2 + 2, 12 * 2 + 12 * 2 + 11 * 2  # by question, full stops too
    share = f"{1 - known / pieces:.0%} of the text is unknown"
    assert share in capsys.readouterr().out


def test_a_model_that_diverges_gives_no_answers(files, monkeypatch, capsys):
    def not_finite(config, model, params, questions, *_):
        return np.full((2, len(questions.windows), 32), np.nan, np.float32)

    monkeypatch.setattr(answer_module, "logits", not_finite)
    with pytest.raises(InputError, match="the model's scores are not finite"):
        run(files, optimizer="adam", steps=1, freeze_step=None)
    assert not (files.out / "predictions.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq": 7}, "--seq must be at least 8, not 7"),
        ({"epochs": 1.0}, "--steps and --epochs say the same"),
        ({"start": Path("a"), "model": "tiny"}, "--model is of random weights"),
        ({"vocab": None}, "give --vocab, or --start"),
        ({"train": None}, "give --train FILE"),
        (
            {"predict": Path("a")},
            "--predict answers without training; drop it, or --tr",
        ),
        ({"predict": Path("a"), "train": None}, "give --start, or --resume for those"),
    ],
)
def test_flags_that_cannot_be_trained_with_are_refused(files, changes, message):
    with pytest.raises(InputError, match=message):
        check(dataclasses.replace(files, **changes))


def test_what_cannot_be_used_is_refused(files, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(
        InputError, match=r"no weights; .* pytorch_model\.bin, or a run"
    ):
        run(files, start=tmp_path)
    (tmp_path / "config.json").write_text('{"command": "train.lm"}')
    (tmp_path / "checkpoints" / "8").mkdir()
    with pytest.raises(
        InputError, match=r"a run of train.lm; give one of train\.pretr"
    ):
        run(files, start=tmp_path)
    (tmp_path / "config.json").write_text('{"command": "train.pretrain"}')
    (tmp_path / "checkpoints" / "8").rename(tmp_path / "checkpoints" / "0")
    with pytest.raises(InputError, match="has not trained a step; let it go on by"):
        run(files, start=tmp_path)
    for changes, message in (
        ({"start": Path("bert-base")}, "there is no folder bert-base; names of Hugg"),
        ({"seq": 33}, "--seq 33 is more than the 32 positions"),
        ({"batch": 7}, "--batch 7 cannot be shared equally by 2"),
        ({"topology": "hierarchical"}, "there is one process; start one on each"),
        ({"resume": True}, "no run in .*; give the folder"),
        ({"warmup_steps": 6}, "--warmup-steps 6 leaves none of the 6 step"),
        ({"null_threshold": 1.0}, "--null-threshold is of questions that may"),
    ):
        with pytest.raises(InputError, match=message):
            run(files, **changes)
    assert not files.out.exists()
