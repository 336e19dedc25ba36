"""What the tests of the application's runs share: a small text, small flags."""

import jax
import numpy as np

from train.bert.config import PretrainConfig
from train.bert.pretrain import parse, pretrain
from train.core import metrics_log as record

FREEZE = 4
WARMUP = 2
STEPS = 8
# Optax's own Adam mixes integers and floats, which strict promotion bars.
PROMOTION = jax.numpy_dtype_promotion("standard")


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
        eval_every=4,
        checkpoint_every=2,
        log_every=1,
        compare=True,
    )


def resume(folder, *flags):
    with PROMOTION:
        pretrain(parse(["--resume", "--out", str(folder), *flags]).training)


def steps_of(folder):
    return [line for line in record.read(folder) if "stage" in line]
