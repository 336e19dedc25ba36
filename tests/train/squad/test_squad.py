"""Fine-tuning for spans learns, resumes exactly, and says what it cannot use."""

import dataclasses
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from launching import Launched, arrays_of
from runs import (
    PROMOTION,
    SMALL,
    resume,
    small_config,
    steps_of,
    train,
    without_speed,
    write_corpus,
)
from squad_files import answer

import onebit_jax
from models import Encoder, huggingface
from train.core import loop, metrics_log
from train.core.errors import InputError
from train.core.optimizer import OPTIMIZERS
from train.core.processes.watchdog import Watchdog
from train.data.model_folder import TOKENIZER
from train.data.vocabulary import SPECIAL, train_vocabulary, write_vocabulary
from train.squad import answer as answer_module
from train.squad import initial_weights
from train.squad.command import answer_alone, fine_tune, parse
from train.squad.config import SquadConfig, check
from train.squad.dataset import read_squad
from train.squad.initial_weights import read_weights
from train.squad.objective import init_params
from train.squad.scores import evaluate

CONTEXTS = (
    "The red fox sleeps in a deep den near the old river.",
    "A grey owl hunts at night above the quiet frozen lake.",
    "Nine small boats left the harbour before the storm came.",
)
TOO_MANY = {"steps": None, "epochs": 1e308}
ASKED = (("Who?", "red fox", "grey owl", "Nine small boats"),
         ("Where?", "a deep den", "the quiet frozen lake", "the harbour"))  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """A SQuAD file and its vocabulary."""
    return write_squad(tmp_path)


def write_squad(folder):
    paragraphs = [
        {
            "context": context,
            "qas": [
                {
                    "id": f"{i}{name}",
                    "question": name,
                    "answers": [answer(texts[i], context)],
                }
                for name, *texts in ASKED
            ],
        }
        for i, context in enumerate(CONTEXTS)
    ]
    train = folder / "train.json"
    train.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    vocab = folder / "vocab.txt"
    write_vocabulary(
        vocab, train_vocabulary([[c] for c in (*CONTEXTS, "who where")], 150)
    )
    return SquadConfig(
        train=train,
        vocab=vocab,
        workers=2,
        batch=6,
        seq=32,
        steps=6,
        freeze_step=3,
        learning_rate=3e-3,
        dropout=0.1,
        checkpoint_every=4,
        log_every=1,
        out=folder / "run",
    )


def run(config, **changes):
    with PROMOTION, mock.patch.object(initial_weights, "SIZES", {"tiny": SMALL}):
        return fine_tune(dataclasses.replace(config, **changes))


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
    again = read_weights(files.out / "model", None, "tiny")
    assert not again.cased
    of_run = read_weights(files.out, None, "tiny")
    chex.assert_trees_all_equal(of_run.params, params)
    (files.out / "model" / TOKENIZER).write_text('{"do_lower_case": false}')
    assert read_weights(files.out / "model", None, "tiny").cased
    chex.assert_trees_all_equal(again.params, params)


def test_questions_without_answers_are_scored_at_the_best_threshold_too(
    files, monkeypatch
):
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
    best = json.loads((files.out / "scores.json").read_text())["best"]
    assert best["f1"] >= max(scores["all"].f1, 50)  # Nothing answered is right in half.
    threshold = best.pop("null_threshold")
    there = run(files, **plain, resume=True, null_threshold=threshold)
    assert there["all"]._asdict() == best
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
    names += " predictions.json nbest_predictions.json scores.json " + TOKENIZER
    assert {path.name for path in files.out.iterdir()} == set(names.split())
    other = dataclasses.replace(files, out=tmp_path / "other")

    def kill(folder, metrics, append=metrics_log.append):
        if metrics.step == 5:
            raise Killed
        append(folder, metrics)

    def kill_at_once(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop.Checkpoints, "save", kill_at_once)
        with pytest.raises(Killed):
            run(other)
    with monkeypatch.context() as patch:
        patch.setattr(metrics_log, "append", kill)
        with pytest.raises(Killed):
            run(other, resume=True)
    assert [line["step"] for line in steps_of(other.out)] == [1, 2, 3, 4]
    with pytest.raises(InputError, match="already holds a run"):
        run(other)
    with pytest.raises(InputError, match=r"--learning-rate 0\.003, not 0\.1"):
        run(other, resume=True, learning_rate=0.1)
    files.train.write_text(files.train.read_text() + " ")
    with pytest.raises(InputError, match="the training file is not the one"):
        run(other, resume=True)
    files.train.write_text(files.train.read_text().rstrip())
    # The folder remembers everything else, the word pieces too.
    files.vocab.unlink()
    flags = ["--resume", "--out", str(other.out), "--log-every", "1"]
    run(parse(flags).training)
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


@pytest.mark.slow
def test_hosts_compress_for_their_devices_together(files, tmp_path):
    flags = (
        f"--train {files.train} --vocab {files.vocab} --batch 8 --seq 32 --steps 4 "
        "--freeze-step 2 --warmup-steps 1 --log-every 1 --workers 4"
    ).split()
    command = ["-m", "train.squad", *flags, "--out", tmp_path / "run"]
    with Launched(command=command) as launched:
        assert launched.end() == 0, launched.said
    assert "onebit_adam: between hosts" in launched.said
    values = json.loads((tmp_path / "run" / "config.json").read_text())
    assert values["flags"]["topology"] == "hierarchical"


def encoder_of(files, **sizes):
    num_pieces = len(files.vocab.read_text().splitlines())
    config = dataclasses.replace(SMALL, vocab_size=num_pieces, **sizes)
    state = nnx.state(Encoder(config, rngs=nnx.Rngs(7)), nnx.Param)
    return config, jax.device_get(nnx.to_pure_dict(state))


def write_weights(files, **sizes):
    """A folder in Hugging Face's layout."""
    config, encoder = encoder_of(files, **sizes)
    head = {"kernel": np.zeros((32, 2), np.float32), "bias": np.zeros(2, np.float32)}
    folder = files.out.parent / "weights"
    huggingface.write(
        folder, config, {"bert": encoder, "span": head}, "BertForQuestionAnswering"
    )
    return folder


def write_headless(files):
    """Weights that have learnt nothing yet, and their word pieces."""
    config, encoder = encoder_of(files)
    folder = files.out.parent / "headless"
    pooler = {
        "kernel": np.zeros((32, 32), np.float32),
        "bias": np.zeros(32, np.float32),
    }
    huggingface.write(folder, config, {**encoder, "pooler": pooler}, "BertModel")
    shutil.copy(files.vocab, folder)
    return folder


def test_fine_tuning_starts_from_hugging_faces_weights(files):
    vocabulary = (files.vocab).read_text().splitlines()
    folder = write_weights(files)
    config, encoder = encoder_of(files)
    weights = read_weights(folder, files.vocab, "tiny")
    assert weights.config == config
    assert weights.params.keys() == {"bert", "span"}
    chex.assert_trees_all_equal(weights.params["bert"], encoder)
    # Learnt before, the head is no random one.
    begun = init_params(config, 0, weights.params)
    assert not begun["span"]["kernel"].any()
    files.vocab.write_text("\n".join([*vocabulary, "more"]) + "\n")
    match = (
        rf"has {len(vocabulary) + 1} word pieces and the weights .* {len(vocabulary)};"
    )
    with pytest.raises(InputError, match=match):
        read_weights(folder, files.vocab, "tiny")


@pytest.mark.slow
def test_fine_tuning_starts_from_a_pretraining_run(tmp_path, capsys):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    config = dataclasses.replace(
        small_config(write_corpus(corpus)),
        pre_norm=True,
        steps=2,
        freeze_step=1,
        warmup_steps=1,
        workers=2,
        out=tmp_path / "pretrained",
    )
    train(config)
    weights = read_weights(config.out, None, "large")
    assert weights.config.num_layers == SMALL.num_layers
    assert weights.config.pre_norm
    model = Encoder(weights.config, rngs=nnx.Rngs(0))
    random = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    chex.assert_trees_all_equal_shapes_and_dtypes(weights.params["bert"], random)
    scale = weights.params["bert"]["embeddings"]["norm"]["scale"]
    moved = np.abs(scale - np.ones_like(scale))
    assert 0 < moved.max() < 0.1  # two steps from where it began
    # Adam's run beside it has no vocabulary of its own.
    vocab = config.out / "vocab.txt"
    assert read_weights(config.out / "adam", vocab, "large").config == weights.config

    files = write_squad(tmp_path)
    tuned = dataclasses.replace(files, start=config.out, vocab=None, steps=1, seq=24)
    faster = {"dtype": "bfloat16", "remat": "layer"}
    run(tuned, freeze_step=None, **faster)
    # Hugging Face's BERT has no Pre-LayerNorm.
    assert "weights are in the checkpoints" in capsys.readouterr().out
    assert not (files.out / "model").exists()
    assert (files.out / "scores.json").exists()
    for data in (config.out / "checkpoints" / "2" / "arrays").rglob("d/*"):
        if data.stat().st_size > 1e4:  # the parameters and the state, not their index
            data.write_bytes(data.read_bytes()[:9])
    with pytest.raises(InputError, match=r"the checkpoint .*/2 cannot be read"):
        read_weights(config.out, None, "large")
    (config.out / "checkpoints" / "2" / "about" / "metadata").write_text("{")
    with pytest.raises(InputError, match=r"the checkpoint .*/2 is damaged"):
        read_weights(config.out, None, "large")


@pytest.mark.slow
def test_fine_tuning_starts_from_the_mean_of_workers_that_stepped_alone(
    tmp_path, monkeypatch
):
    alone = partial(onebit_jax.zero_one_adam, sync=onebit_jax.every(5))
    optimizer = OPTIMIZERS["zero_one_adam"]._replace(make=alone)
    monkeypatch.setitem(OPTIMIZERS, "zero_one_adam", optimizer)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    config = dataclasses.replace(
        small_config(write_corpus(corpus)),
        optimizer="zero_one_adam",
        compare=False,
        steps=4,
        freeze_step=1,
        warmup_steps=1,
        workers=2,
        out=tmp_path / "pretrained",
    )
    train(config)
    assert steps_of(config.out)[-1]["stage"] == "local"
    saved = arrays_of(config.out, 4)
    leaf = "bert.embeddings.norm.scale"
    (own,) = (x for k, x in saved.items() if "moved" in k and k.endswith(leaf))
    assert own.any()
    begun = read_weights(config.out, None, "tiny").params
    np.testing.assert_allclose(
        begun["bert"]["embeddings"]["norm"]["scale"],
        saved[f"params.{leaf}"] + own.mean(axis=0),
        rtol=1e-6,
    )
    # The folder for others holds the same, and the heads, and is made where it is gone.
    model = config.out / "model"
    of_model = read_weights(model, None, "tiny")
    assert of_model.vocabulary == read_weights(config.out, None, "tiny").vocabulary
    chex.assert_trees_all_equal(of_model.params, begun)
    _, params = huggingface.read(model, "BertForPreTraining")
    assert params["masked"]["bias"].any()
    shutil.rmtree(model)
    resume(config.out)
    again = huggingface.read(model, "BertForPreTraining")[1]
    chex.assert_trees_all_equal(again, params)


def test_what_cannot_be_used_is_refused(files, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InputError, match="holds no weights; give as --start"):
        run(files, start=tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match=r"its weights are in pytorch_model\.bin"):
        run(files, start=tmp_path)
    (tmp_path / "config.json").write_text('{"command": "train.pretrain"}')
    with pytest.raises(InputError, match=r"a run of train\.pretrain without a check"):
        run(files, start=tmp_path)
    (tmp_path / "config.json").write_text('{"command": "train.lm"}')
    (tmp_path / "checkpoints" / "8").mkdir()
    with pytest.raises(
        InputError, match=r"a run of train.lm; give one of train\.pretr"
    ):
        run(files, start=tmp_path)
    with pytest.raises(InputError, match="there is no folder bert-base; names of Hugg"):
        run(files, start=Path("bert-base"))
    with pytest.raises(InputError, match="--seq 33 is more than the 32 positions"):
        run(files, seq=33)
    with pytest.raises(InputError, match=r"--batch 7 cannot be shared equally by 2"):
        run(files, batch=7)
    with pytest.raises(InputError, match="there is one process; start one on each"):
        run(files, topology="hierarchical")
    with pytest.raises(InputError, match="--attention cudnn needs NVIDIA GPUs"):
        run(files, attention="cudnn", dtype="bfloat16")
    with pytest.raises(InputError, match=r"no run in .*; give the folder"):
        run(files, resume=True)
    with pytest.raises(InputError, match=r"--epochs 1e\+308 make more than 2,147,483"):
        run(files, **TOO_MANY)
    with pytest.raises(InputError, match="--warmup-steps 6 leaves none of the 6 step"):
        run(files, warmup_steps=6)
    with pytest.raises(InputError, match="--null-threshold is of questions that may"):
        run(files, null_threshold=1.0)
    assert not files.out.exists()


def test_questions_whose_answers_nobody_knows_are_answered(files, tmp_path, capsys):
    plain = {"optimizer": "adam", "freeze_step": None, "steps": 1}
    run(files, **plain, stride=4, num_best=3)
    kept = (files.out / "predictions.json").read_text()
    said = capsys.readouterr().out
    assert f"{files.out}: BERT of 1 layers of 32, 6 questions in 6 windows, " in said
    assert "2 workers (cpu), to step 1" in said
    assert f"{files.out / 'predictions.json'}: the answers to 6 questions" in said
    assert f"{files.out / 'model'}: the weights" in said
    content = json.loads(files.train.read_text())
    for paragraph in content["data"][0]["paragraphs"]:
        for question in paragraph["qas"]:
            del question["answers"]
    asked = tmp_path / "new.json"
    asked.write_text(json.dumps(content))
    resumed = ["--resume", "--out", str(files.out), "--predict", str(asked)]
    before = {path.name for path in files.out.iterdir()}
    with PROMOTION:
        answer_alone(parse(resumed).training)
    answers = files.out / "predictions_new.json"
    assert answers.read_text() == kept
    names = {answers.name, f"nbest_{answers.name}"}
    assert {path.name for path in files.out.iterdir()} == before | names
    assert f"{answers}: the answers to 6 questions" in capsys.readouterr().out
    # Another program, of other settings, by weights alone.
    asked.write_text(json.dumps({**content, "version": "v2.0"}))
    for start in (files.out, files.out / "model"):
        out = tmp_path / f"by {start.name}"
        flags = f"--seq 32 --stride 4 --batch 6 --workers 2 --predict {asked}".split()
        flags += ["--start", str(start), "--out", str(out)]
        with PROMOTION:
            answer_alone(parse([*flags, "--null-threshold", "1e9"]).training)
        assert (out / answers.name).read_text() == kept
        assert (out / "null_odds_new.json").exists()
    flags[flags.index("--start") + 1] = str(write_headless(files))
    with pytest.raises(InputError, match="have not learnt to answer; give those of"):
        answer_alone(parse(flags).training)


def test_answers_that_are_whole_in_no_window_are_told_of(files, capsys):
    content = json.loads(files.train.read_text())
    asked = [p["qas"][0] for p in content["data"][0]["paragraphs"]]
    asked[0]["answers"] = [{"text": CONTEXTS[0], "answer_start": 0}]
    files.train.write_text(json.dumps(content))
    with pytest.raises(InputError, match="--epochs"):  # after the check
        run(files, seq=12, **TOO_MANY)
    assert "1 of 6 answers are whole in no window" in capsys.readouterr().out
    content["data"][0]["paragraphs"] = content["data"][0]["paragraphs"][:1]
    content["data"][0]["paragraphs"][0]["qas"] = asked[:1]
    files.train.write_text(json.dumps(content))
    with pytest.raises(InputError, match="no answer is whole in a window"):
        run(files, seq=12)


def test_a_vocabulary_that_does_not_know_the_text_is_told_of(files, capsys):
    write_vocabulary(files.vocab, [*SPECIAL, "red", "fox", "who", "?"])
    with pytest.raises(InputError, match="--epochs"):
        run(files, **TOO_MANY)
    known, pieces = 2 + 2, 12 * 2 + 12 * 2 + 11 * 2  # by question, full stops too
    share = f"{1 - known / pieces:.0%} of the text is [UNK]"
    assert share in capsys.readouterr().out


def test_a_model_that_diverges_gives_no_answers(files, monkeypatch, capsys):
    def not_finite(model, params, windows, *_):
        return tuple(np.full((2, len(windows), 32), np.nan, np.float32))

    monkeypatch.setattr(answer_module, "logits", not_finite)
    with pytest.raises(InputError, match="the model's scores are not finite"):
        run(files, optimizer="adam", steps=1, freeze_step=None, learning_rate=1e-3)
    assert not (files.out / "predictions.json").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "has tokenizer_class 'BertJap"),
        ({"do_lower_case": "false"}, "has do_lower_case 'false'"),
        ({"do_lower_case": True, "strip_accents": False}, "has strip_accents False"),
        ({"tokenize_chinese_chars": False}, "has tokenize_chinese_chars False"),
    ],
)
def test_a_tokenizer_that_cuts_in_another_way_is_refused(files, settings, message):
    folder = write_weights(files)
    (folder / TOKENIZER).write_text(json.dumps(settings))
    with pytest.raises(InputError, match=message):
        read_weights(folder, files.vocab, "tiny")
    same = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (folder / TOKENIZER).write_text(json.dumps({**same, "strip_accents": False}))
    assert read_weights(folder, files.vocab, "tiny").cased


def test_weights_with_one_type_of_tokens_are_refused(files):
    folder = write_weights(files, num_token_types=1)
    with pytest.raises(InputError, match="have one type of tokens"):
        read_weights(folder, files.vocab, "tiny")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq": 7}, "--seq must be at least 8, not 7"),
        ({"stride": 0}, "--stride must be at least 1"),
        ({"epochs": 0.0}, "--epochs must be positive"),
        ({"epochs": 1.0}, "--steps and --epochs say the same"),
        ({"start": Path("a"), "model": "tiny"}, "--model is of random weights"),
        ({"null_threshold": float("inf")}, "--null-threshold must be a finite number"),
        ({"optimizer": "adam"}, "--freeze-step is not a flag of --optimizer adam"),
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


def test_a_mistake_ends_in_one_sentence(tmp_path):
    file = tmp_path / "train.json"
    file.write_text("{}")
    vocab = tmp_path / "vocab.txt"
    write_vocabulary(vocab, SPECIAL)
    command = [sys.executable, "-m", "train.squad", "--train", str(file)]
    done = subprocess.run(
        [*command, "--vocab", str(vocab)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {file}: not a SQuAD file: the file has no 'data'")
