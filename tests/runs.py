"""A small text, a small model and small flags, for tests of the application."""

from dataclasses import replace
from unittest import mock

import jax
import numpy as np

from models import SIZES
from train.bert import task
from train.bert.config import PretrainConfig
from train.bert.pretrain import parse, pretrain
from train.core import metrics_log

FREEZE = 4
WARMUP = 2
STEPS = 8
# Optax's own Adam mixes integers and floats, which strict promotion bars.
PROMOTION = jax.numpy_dtype_promotion("standard")
SMALL = replace(
    SIZES["tiny"],
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    intermediate_size=64,
    max_positions=32,
)


def write_corpus(folder):
    rng = np.random.default_rng(0)
    words = ["sun", "moon", "star", "river", "stone", "tree", "cloud", "wind", "rain"]
    for i in range(8):
        sentences = [
            " ".join(rng.choice(words, rng.integers(3, 9))).capitalize() + "."
            for _ in range(30)
        ]
        (folder / f"{i}.txt").write_text(" ".join(sentences))
    return folder


def small_config(corpus):
    return PretrainConfig(
        corpus=(corpus,),
        vocab_size=100,
        steps=STEPS,
        batch=8,
        seq=16,
        warmup_steps=WARMUP,
        freeze_step=FREEZE,
        warmup_bits=32,  # it compiles faster
        eval_every=4,
        eval_sequences=8,
        checkpoint_every=2,
        log_every=1,
        compare=True,
    )


def train(config):
    with PROMOTION, mock.patch.object(task, "SIZES", {"tiny": SMALL}):
        pretrain(config)


def resume(folder, *flags):
    train(parse(["--resume", "--out", str(folder), *flags]).training)


def steps_of(folder):
    return [line for line in metrics_log.read(folder) if "stage" in line]


def without_speed(lines):
    return [
        {name: value for name, value in line.items() if name != "examples_per_second"}
        for line in lines
    ]
