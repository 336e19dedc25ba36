"""A small fine-tuning for tests: texts, questions, flags and weights."""

import dataclasses
import json
import shutil
from unittest import mock

import jax
import numpy as np
from flax import nnx
from runs import PROMOTION, SMALL
from squad_files import answer

from models import Encoder, huggingface
from train.data.vocabulary import train_vocabulary, write_vocabulary
from train.squad import initial_weights
from train.squad.command import fine_tune
from train.squad.config import SquadConfig

CONTEXTS = (
    "The red fox sleeps in a deep den near the old river.",
    "A grey owl hunts at night above the quiet frozen lake.",
    "Nine small boats left the harbour before the storm came.",
)
ASKED = (("Who?", "red fox", "grey owl", "Nine small boats"),
         ("Where?", "a deep den", "the quiet frozen lake", "the harbour"))  # fmt: skip


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
