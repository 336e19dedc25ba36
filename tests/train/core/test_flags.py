"""The application's flags, and what it writes line by line."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import onebit_jax
from models import SIZES
from train.bert.config import PretrainConfig, check, from_json, to_json
from train.bert.data import load, load_phases
from train.bert.examples import element
from train.bert.objective import abstract_params, init_params
from train.bert.presets import PRESETS
from train.bert.pretrain import parse, pretrain
from train.core import metrics_log as record
from train.core import picture
from train.core.command import say_if_not_compressed
from train.core.errors import InputError
from train.core.metrics_log import StepMetrics
from train.core.optimizer import (
    decays,
    freeze_rule,
    learning_rate_schedule,
    make_optimizer,
)
from train.core.run_folder import Run
from train.core.totals import Sent
from train.data.vocabulary import SPECIAL, read_vocabulary, write_vocabulary

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "train.pretrain"]


@pytest.fixture
def config(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(4):
        (corpus / f"{i}.txt").write_text("The sun is a star. The moon is not one.")
    return PretrainConfig(
        corpus=(corpus,), vocab_size=100, batch=8, freeze_step=200, compare=True
    )


def test_bytes_are_counted_by_the_stage_each_step_ran_in():
    rates = {"warmup": 100, "compressed": 3}
    sent = Sent().after(4, frozen_at=0, skipped=1, rates=rates)
    assert (sent.stage, sent.total_bytes) == ("warmup", 400)
    # Frozen after 5 steps that were taken and 1 that was not.
    sent = sent.after(10, frozen_at=5, skipped=1, rates=rates)
    assert (sent.warmup_steps, sent.stage) == (6, "compressed")
    assert sent.total_bytes == 6 * 100 + 4 * 3
    sent = sent.after(11, frozen_at=5, skipped=2, rates=rates)
    assert sent.total_bytes == 6 * 100 + 5 * 3
    # Frozen at the very step that is looked at: the next is the first compressed.
    sent = Sent().after(5, frozen_at=5, skipped=0, rates=rates)
    assert (sent.stage, sent.total_bytes) == ("warmup", 500)
    assert sent.after(6, frozen_at=5, skipped=0, rates=rates).total_bytes == 503


def test_bytes_are_counted_on_in_a_second_phase():
    rates = {"warmup": 100, "compressed": 3}
    first = Sent().after(10, frozen_at=4, skipped=1, rates=rates)
    assert first.total_bytes == 4 * 100 + 6 * 3
    second = first.at_phase_start()
    assert (second.stage, second.taken, second.total_skipped) == ("warmup", 0, 1)
    second = second.after(12, frozen_at=0, skipped=1, rates=rates)
    assert (second.stage, second.taken, second.total_skipped) == ("warmup", 1, 2)
    second = second.after(20, frozen_at=4, skipped=1, rates=rates)
    assert (second.stage, second.warmup_steps) == ("compressed", 5)
    assert second.total_bytes == first.total_bytes + 5 * 100 + 5 * 3


def test_losses_that_are_not_finite_are_written_as_json(tmp_path):
    metrics = StepMetrics(1, float("nan"), "warmup", 1, 1, 1, 0.1, 1.0)
    record.append(tmp_path, metrics)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None
    picture.draw(tmp_path / "picture.png", {"adam": record.read(tmp_path)})


def test_a_run_keeps_its_vocabulary_and_a_new_one_takes_what_is_given(
    config, tmp_path, capsys
):
    given = tmp_path / "given.txt"
    write_vocabulary(given, (*SPECIAL, "sun", "moon"))
    kept = tmp_path / "vocab.txt"
    write_vocabulary(kept, (*SPECIAL, "moon", "sun"))
    with_given = replace(config, vocab=given)
    new = load(with_given, tmp_path)
    assert "% of the text is [UNK] in this vocabulary" in capsys.readouterr().out
    assert new.vocabulary == read_vocabulary(given)
    assert "star" in load(config, tmp_path).vocabulary
    assert "[UNK]" not in capsys.readouterr().out
    run = Run(with_given, new.corpus, new.vocabulary_name, until=1)
    with pytest.raises(InputError, match="the vocabulary is not the one that the run"):
        load_phases(with_given, tmp_path, run)
    write_vocabulary(kept, new.vocabulary)
    given.unlink()
    (going_on,) = load_phases(with_given, tmp_path, run)
    assert going_on.vocabulary == new.vocabulary


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"batch": 0}, "--batch must be at least 1"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"warmup_steps": 2**31}, "--warmup-steps must be at most 2147483647, not 21"),
        ({"seed": 2**32}, "--seed must be at most 4294967295, not 4294967296"),
        ({"clip": float("nan")}, "--clip must be at least 0, not nan"),
        ({"clip": float("inf")}, "--clip must be a finite number, not inf"),
        ({"weight_decay": float("inf")}, "--weight-decay must be a finite number"),
        ({"learning_rate": float("inf")}, "--learning-rate must be a finite number"),
        ({"freeze_step": 0}, "--freeze-step must be at least 1"),
        ({"learning_rate": 0.0}, "--learning-rate must be positive"),
        ({"dropout": 1.0}, "--dropout must be less than 1"),
        ({"seq": 7}, "--seq must be from 8 to 512, the positions of BERT tiny, not 7"),
        ({"seq": 513}, "--seq must be from 8 to 512"),
        ({"workers": 64}, "--workers 64 is more than the 8 devices here (cpu)"),
        ({"batch": 12}, "--batch 12 cannot be shared equally by 8 workers"),
        ({"accumulate": 0}, "--accumulate must be at least 1, not 0"),
        ({"accumulate": 2}, "--accumulate 2 cannot divide the 1 sequences of each"),
        (
            {"optimizer": "adam"},
            "--compare belongs to 1-bit Adam; drop --optimizer adam",
        ),
        (
            {"optimizer": "adam", "compare": False},
            "--freeze-step belongs to 1-bit Adam",
        ),
        (
            {
                "optimizer": "adam",
                "compare": False,
                "freeze_step": None,
                "wire": "counts",
            },
            "--wire belongs to 1-bit Adam",
        ),
        ({"long_steps": 4}, "--long-steps is of a second phase, and there is none"),
        ({"long_seq": 513}, "--long-seq must be from 8 to 512"),
        ({"long_seq": 64, "long_batch": 12}, "--long-batch 12 cannot be shared equa"),
        ({"long_seq": 64, "long_steps": 0}, "--long-steps must be at least 1, not 0"),
        ({"attention": "cudnn"}, "computes in bfloat16 or float16, not float32"),
        ({"decay_rate": 0.0}, "--decay-rate must be positive"),
        ({"decay_rate": 0.9}, "give --decay-every too"),
        ({"long_seq": 64, "long_decay_rate": 0.9}, "give --long-decay-every too"),
        ({"vocab_size": 3}, "a vocabulary of 3 leaves no room"),
        ({"vocab": Path("a.txt")}, "--vocab-size is of a vocabulary trained on"),
        (
            {"vocab": Path("nowhere.txt"), "vocab_size": None},
            "the vocabulary nowhere.txt cannot be read",
        ),
        ({"corpus": (Path("nowhere"),)}, "the corpus nowhere cannot be read"),
    ],
)
def test_flags_that_cannot_be_trained_with_are_refused(
    config, tmp_path, changes, message
):
    out = tmp_path / "run"
    with pytest.raises(InputError) as caught:
        pretrain(replace(config, out=out, **changes))
    assert message in str(caught.value)
    assert not out.exists()


def test_an_output_that_is_a_file_is_refused(config, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="is a file; give a folder"):
        pretrain(replace(config, out=tmp_path / "run"))


@pytest.mark.parametrize("out", ["file/run", "link", "n" * 300])
def test_an_output_that_cannot_be_made_is_refused(config, tmp_path, out):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"cannot be written to \(.+\); give another"):
        pretrain(replace(config, out=tmp_path / out))


def test_the_largest_seed_is_taken(config, tmp_path):
    seed = 2**32 - 1
    check(replace(config, seed=seed))
    init_params(SIZES["tiny"], seed)
    assert element(load(config, tmp_path).training, 0).token_ids.any()


def test_freezing_before_the_warm_up_ends_is_warned_of():
    with pytest.warns(UserWarning, match="while the learning rate still rises"):
        make_optimizer(
            "onebit_adam",
            learning_rate_schedule(1e-3, 6, 8),
            freeze_rule(4, 6, 8),
            onebit_jax.sign_mean("data"),
            weight_decay=0.0,
            clip=0.0,
        )


def test_a_freeze_that_never_came_is_told_of(capsys):
    say_if_not_compressed("--long-freeze-step", Sent(steps=5, warmup_steps=4))
    assert not capsys.readouterr().out
    say_if_not_compressed("--long-freeze-step", Sent(steps=4, warmup_steps=4))
    said = capsys.readouterr().out
    assert said.startswith("no step was compressed: up to step 4 ")
    assert said.endswith("a number as --long-freeze-step.\n")


def test_the_freeze_follows_the_warm_up_and_the_steps_by_default():
    default = PretrainConfig(steps=300)
    (phase,) = default.phases
    assert (phase.warmup, phase.freeze) == (30, 60)
    assert replace(default, warmup_steps=100).phases[0].freeze == 100
    assert replace(default, freeze_step="auto").phases[0].freeze == "auto"
    assert PretrainConfig(steps=1).phases[0].freeze == 1


def test_a_second_phase_takes_what_is_not_given_from_the_first():
    config = PretrainConfig(
        steps=900, batch=32, accumulate=2, learning_rate=0.1, long_seq=128
    )
    first, second = config.phases
    assert (first.last, second.earlier_steps, second.steps) == (900, 900, 100)
    assert config.total_steps == second.last == 1000
    assert second == replace(
        first,
        flags="--long-",
        seq=128,
        earlier_steps=900,
        steps=100,
        warmup=10,
        freeze=20,
    )
    auto = replace(config, freeze_step="auto", long_batch=8, long_decay_every=3)
    assert auto.phases[1].freeze == "auto"
    assert (auto.phases[1].batch, auto.phases[1].decay_every) == (8, 3)


def test_presets_are_the_papers_and_flags_override_them():
    config = parse(["--preset", "bert-large", "--batch", "512"]).training
    first, second = config.phases
    assert (config.model, first.batch, first.seq, second.seq) == (
        "large",
        512,
        128,
        512,
    )
    assert (first.steps, first.freeze, first.warmup) == (152_000, 23_000, 12_500)
    assert (second.steps, second.freeze, second.batch) == (10_000, 1500, 512)
    base = parse(["--preset", "bert-base"]).training
    assert (base.model, base.batch, base.learning_rate) == ("base", 4096, 4e-4)
    assert [phase.steps for phase in base.phases] == [118_000, 22_000]
    assert [phase.freeze for phase in base.phases] == [16_000, 1500]
    assert [phase.decay_rate for phase in (first, second)] == [0.99, 0.9]
    check(config)
    stored = from_json(json.loads(json.dumps(to_json(config))))
    assert stored == replace(config, out=config.out.resolve())
    single = parse(["--preset", "bert-base", "--long-seq", "None"]).training
    check(single)
    assert len(single.phases) == 1
    other_text = parse(["--preset", "bert-base", "--vocab", "vocab.txt"]).training
    check(other_text)
    linear = ["--preset", "bert-base", "--decay-every", "None"]
    check(parse(linear).training)
    linear += ["--long-decay-every", "None"]
    with pytest.raises(InputError, match="or --long-decay-rate None"):
        check(parse(linear).training)
    check(parse([*linear, "--long-decay-rate", "None"]).training)
    adam = parse(["--preset", "bert-base", "--optimizer", "adam"]).training
    check(adam)
    assert adam.phases[0].learning_rate == 4e-4


def test_an_exponential_fall_follows_the_warm_up():
    (phase, _) = PRESETS["bert-large"].phases
    schedule = learning_rate_schedule(
        phase.learning_rate,
        phase.warmup,
        phase.steps,
        decay_rate=phase.decay_rate,
        decay_every=phase.decay_every,
    )
    steps = np.array([0, 12_499, 12_500, 12_500 + 520, 12_500 + 52_000, 200_000])
    expected = 4e-4 * np.where(
        steps < 12_500, (steps + 1) / 12_500, 0.99 ** ((steps - 12_500) / 520)
    )
    np.testing.assert_allclose([schedule(s) for s in steps], expected, rtol=1e-3)


def test_biases_and_norms_do_not_decay():
    mask = decays(abstract_params(SIZES["tiny"]))
    decaying = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, decay in jax.tree.leaves_with_path(mask)
        if decay
    }
    assert {name.rpartition(".")[2] for name in decaying} == {"kernel", "embedding"}
    assert "bert.layers.1.attention.qkv.kernel" in decaying
    assert "bert.embeddings.word.embedding" in decaying


def test_a_mistake_on_the_command_line_ends_in_one_sentence(tmp_path):
    done = subprocess.run(
        [*COMMAND, "--out", str(tmp_path / "run"), "--seq", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: --seq must be from 8 to 512, the positions of BERT tiny, not 4.\n"
    )
