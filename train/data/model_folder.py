"""The folder of a trained BERT in Hugging Face's layout: weights and tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import jax

from models import huggingface
from train.core.errors import writable
from train.core.output import is_main_process, say
from train.core.text_file import replace_text
from train.data.vocabulary import write_vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    from models import BertConfig
    from models.huggingface_names import Architecture
    from train.core.task import Params
    from train.data.vocabulary import Vocabulary

FOLDER = "model"
"""The folder's name in that of a run."""
VOCABULARY = "vocab.txt"
TOKENIZER = "tokenizer_config.json"


def write_tokenizer(folder: Path, vocabulary: Vocabulary, *, cased: bool) -> None:
    """Writes a vocabulary, and whether it is cased, as Hugging Face reads them."""
    write_vocabulary(folder / VOCABULARY, vocabulary)
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": not cased}
    replace_text(folder / TOKENIZER, json.dumps(settings, indent=2) + "\n")


def write_model(
    run: Path,
    model: BertConfig,
    params: Params,
    architecture: Architecture,
    vocabulary: Vocabulary,
    *,
    cased: bool,
) -> None:
    """Writes a model and its tokenizer into a run's folder, on one process of many.

    Raises:
      InputError: The folder cannot be written to.
    """
    if not is_main_process():
        return
    if model.pre_norm:
        say(
            "Hugging Face's BERT has no Pre-LayerNorm: the weights are in the "
            f"checkpoints of {run} alone."
        )
        return
    folder = run / FOLDER
    with writable(run):
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(folder, vocabulary, cased=cased)
        huggingface.write(folder, model, jax.device_get(params), architecture)
    say(f"{folder}: the weights, in Hugging Face's layout")
