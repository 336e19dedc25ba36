"""The flags of pre-training: what contradicts what, phases, presets."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from train.bert.config import PretrainConfig, check
from train.bert.pretrain import parse, pretrain
from train.core.errors import InputError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(4):
        (corpus / f"{i}.txt").write_text("The sun is a star. The moon is not one.")
    return PretrainConfig(
        corpus=(corpus,), vocab_size=100, batch=8, compare=True, out=tmp_path / "run"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"long_seq": 64, "long_steps": 0}, "--long-steps must be at least 1, not 0."),
        ({"seq": 7}, "--seq must be from 8 to 512, the positions of BERT tiny, not 7"),
        ({"long_seq": 513}, "--long-seq must be from 8 to 512"),
        ({"accumulate": 2}, "--accumulate 2 cannot divide the 1 examples of each"),
        ({"long_seq": 64, "long_batch": 12}, "--long-batch 12 cannot be shared equa"),
        ({"long_seq": 64, "seq": 128}, "longer sequences; give 128 (--seq) or more"),
        ({"attention": "cudnn"}, "choose --dtype bfloat16 or --attention xla."),
        (
            {"preset": "bert-base", "corpus": ()},
            "--preset is of pre-trainings on gigabytes of text; give --corpus.",
        ),
        ({"optimizer": "adam"}, "--compare trains plain Adam beside; drop --optimizer"),
        ({"long_steps": 4}, "--long-steps is of a second phase, and there is none"),
        ({"decay_rate": 0.9}, "give --decay-every too"),
        ({"long_seq": 64, "long_decay_rate": 0.9}, "give --long-decay-every too"),
        ({"vocab": Path("a.txt")}, "--vocab-size is of a vocabulary trained on"),
        (
            {"vocab": Path("nowhere.txt"), "vocab_size": None},
            "the vocabulary nowhere.txt cannot be read",
        ),
        ({"corpus": (Path("nowhere"),)}, "the corpus nowhere cannot be read"),
    ],
)
def test_flags_that_cannot_be_trained_with_are_refused(config, changes, message):
    with pytest.raises(InputError) as caught:
        pretrain(replace(config, **changes))
    assert message in str(caught.value)
    assert not config.out.exists()


def test_a_second_phase_takes_what_is_not_given_from_the_first():
    config = PretrainConfig(
        steps=900, batch=32, accumulate=2, learning_rate=0.1, long_seq=128
    )
    first, second = config.phases
    assert (first.warmup, first.freeze) == (90, 126)
    assert (first.last, second.earlier_steps, second.steps) == (900, 900, 100)
    assert config.total_steps == second.last == 1000
    assert second == replace(
        first,
        prefix="--long-",
        seq=128,
        earlier_steps=900,
        steps=100,
        warmup=10,
        freeze=14,
    )
    auto = replace(config, freeze_step="auto", long_batch=8, long_decay_every=3)
    assert auto.phases[1].freeze == "auto"
    assert (auto.phases[1].batch, auto.phases[1].decay_every) == (8, 3)
    # The first phase is over, or ends where the second begins.
    assert (config.fixed, PretrainConfig().fixed) == ({"steps": "--long-steps"}, {})


def test_presets_are_the_papers_and_flags_override_them():
    config = parse(["--preset", "bert-large", "--batch", "512"]).training
    first, second = config.phases
    assert config.model == "large"
    assert (first.batch, first.seq, second.batch, second.seq) == (512, 128, 512, 512)
    assert (first.steps, first.freeze, first.warmup) == (152_000, 23_000, 12_500)
    assert (second.steps, second.freeze, second.warmup) == (10_000, 1500, 150)
    assert [phase.decay_rate for phase in (first, second)] == [0.99, 0.9]
    base = parse(["--preset", "bert-base"]).training
    assert (base.model, base.batch, base.learning_rate) == ("base", 4096, 4e-4)
    assert [phase.steps for phase in base.phases] == [118_000, 22_000]
    assert [phase.freeze for phase in base.phases] == [16_000, 1500]


def test_what_a_preset_has_can_be_left_out():
    base = ["--preset", "bert-base"]
    single = parse([*base, "--long-seq", "None"]).training
    assert len(single.phases) == 1
    adam = parse([*base, "--optimizer", "adam"]).training
    assert adam.phases[0].learning_rate == 4e-4
    linear = [*base, "--decay-every", "None", "--long-decay-every", "None"]
    for taken in (
        single,
        adam,
        parse([*base, "--vocab", "vocab.txt"]).training,
        parse([*base, "--decay-every", "None"]).training,
        parse([*linear, "--long-decay-rate", "None"]).training,
    ):
        check(replace(taken, corpus=(Path("text"),)))
    with pytest.raises(InputError, match="or --long-decay-rate None"):
        check(parse([*linear, "--corpus", "text"]).training)


def test_a_mistake_on_the_command_line_ends_in_one_sentence(
    tmp_path, monkeypatch, capsys
):
    flags = ["--out", str(tmp_path / "run"), "--seq", "4"]
    monkeypatch.setattr(sys, "argv", ["train.pretrain", *flags])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "train" / "pretrain.py"), None, "__main__")
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "error: --seq must be from 8 to 512, the positions of BERT tiny, not 4.\n"
    )
