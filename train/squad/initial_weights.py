"""Weights that fine-tuning starts from, and their vocabulary."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from models import SIZES, BertConfig, WeightsError, huggingface
from train.bert.objective import abstract_params
from train.core import checkpoint, run_folder
from train.core.errors import InputError
from train.core.output import say
from train.data import model_folder
from train.data.vocabulary import is_cased, read_vocabulary
from train.squad.objective import abstract_params as abstract_span_params

if TYPE_CHECKING:
    from pathlib import Path

    from models.config import Size
    from train.data.vocabulary import Vocabulary


# The settings that decide how text is cut, and the values that cut it as here.
_CUT_BY = {
    "tokenizer_class": (None, "BertTokenizer", "BertTokenizerFast"),
    "do_lower_case": (None, True, False),
    "strip_accents": (None,),
    "tokenize_chinese_chars": (None, True),
    "do_basic_tokenize": (None, True),
}
_FILES = f"{huggingface.CONFIG}, {huggingface.WEIGHTS} and {model_folder.VOCABULARY}"
_PICKLED = "pytorch_model.bin"
# The parameters in a run's checkpoints, by the command.
_ABSTRACT = {"train.pretrain": abstract_params, "train.squad": abstract_span_params}


class InitialWeights(NamedTuple):
    """Weights that fine-tuning starts from.

    Attributes:
      config: The model's sizes.
      vocabulary: Its word pieces.
      params: The parameters that are given, by the model's parts: `bert`, and `span`
        if it has been fine-tuned for spans before.
      cased: Whether its tokenizer keeps capitals and accents.
    """

    config: BertConfig
    vocabulary: Vocabulary
    params: dict[str, Any]
    cased: bool


def read_weights(
    folder: Path | None,
    vocab: Path | None,
    model: Size,
) -> InitialWeights:
    """Reads weights and vocabulary.

    Args:
      folder: A folder in Hugging Face's layout, or of a run of `train.pretrain` or
        `train.squad`; None for random weights.
      vocab: The vocabulary; None for the one in the folder.
      model: The name of the size where weights are random.

    Returns:
      The weights.

    Raises:
      InputError: The folder holds neither weights nor a run, a file in it cannot be
        used, its tokenizer cuts text in another way, or its weights have one type of
        tokens or do not fit the vocabulary.
    """
    if folder is not None and folder.is_file():
        raise InputError(f"--start {folder} is a file; give the folder that it is in.")
    if folder is not None and not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}; names of Hugging Face's Hub are not "
            f"fetched: give as --start a folder with its {_FILES}, downloaded."
        )
    if vocab is None:
        if folder is None:
            raise InputError("there is no vocabulary; give --vocab, or --start.")
        vocab = folder / model_folder.VOCABULARY
        if not (vocab.exists() or _has_weights(folder)):
            raise InputError(f"{folder} {_why_without(folder)}.")
    vocabulary = read_vocabulary(vocab)
    if folder is None:
        config = replace(SIZES[model], vocab_size=len(vocabulary))
        return InitialWeights(config, vocabulary, {}, is_cased(vocabulary))
    config, params = _read_folder(folder)
    if config.num_token_types < 2:
        raise InputError(
            f"the weights in {folder} have one type of tokens, by which question and "
            "text cannot be told apart; give weights with two."
        )
    if len(vocabulary) != config.vocab_size:
        raise InputError(
            f"the vocabulary {vocab} has {len(vocabulary):,} word pieces and the "
            f"weights in {folder} have {config.vocab_size:,}; give --vocab theirs."
        )
    return InitialWeights(config, vocabulary, params, _is_cased(folder, vocabulary))


def _read_folder(folder: Path) -> tuple[BertConfig, dict[str, Any]]:
    """The weights of a folder of either kind."""
    if (folder / huggingface.WEIGHTS).exists():
        try:
            return huggingface.read_for_spans(folder)
        except WeightsError as error:
            raise InputError(str(error)) from error
    if checkpoint.exist(folder):
        return _read_run(folder)
    raise InputError(f"{folder} {_why_without(folder)}.")


def _has_weights(folder: Path) -> bool:
    return (folder / huggingface.WEIGHTS).exists() or checkpoint.exist(folder)


def trained_tokens(folder: Path) -> int | None:
    """The tokens of the longest sequences of a run; None where that is not known.

    Args:
      folder: Of a run, or of weights in Hugging Face's layout.
    """
    try:
        flags = run_folder.flags_of(folder)
    except InputError:  # the config.json is Hugging Face's
        return None
    long = flags.get("long_seq")
    is_long = long and checkpoint.latest_step(folder) > flags["steps"]
    return long if is_long else flags["seq"]


def _why_without(folder: Path) -> str:
    """Why a folder holds no weights, and what to do."""
    if run_folder.exists(folder):
        with contextlib.suppress(InputError):  # another config.json
            command = run_folder.command_of(folder)
            return f"is a run of {command} without a checkpoint; give another --start"
    if (folder / _PICKLED).exists():
        return (
            f"holds no weights that are read here: its weights are in {_PICKLED}; load "
            "it by transformers' from_pretrained, and give the folder that "
            "save_pretrained writes"
        )
    return (
        f"holds no weights; give as --start a folder with {_FILES}, or a run of "
        "train.pretrain"
    )


def read_resumed(folder: Path) -> InitialWeights | None:
    """Sizes and vocabulary that a run of `train.squad` goes on with.

    Args:
      folder: The run's folder.

    Returns:
      The sizes and the vocabulary, without weights, which are in the run's
      checkpoint; None where there is none yet.

    Raises:
      InputError: The folder's vocabulary cannot be used.
    """
    if not checkpoint.exist(folder):
        return None
    vocabulary = read_vocabulary(folder / model_folder.VOCABULARY)
    sizes = _saved_sizes(folder)
    return InitialWeights(sizes, vocabulary, {}, _is_cased(folder, vocabulary))


def _is_cased(folder: Path, vocabulary: Vocabulary) -> bool:
    """True if the tokenizer_config.json, or else the vocabulary, keeps capitals."""
    file = folder / model_folder.TOKENIZER
    if not file.exists():
        return is_cased(vocabulary)
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        given = {name: settings.get(name) for name in _CUT_BY}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file} is not JSON with a tokenizer's settings ({error}); mend it, or "
            "remove it to go by the capitals of the vocabulary."
        ) from error
    lowercase = given["do_lower_case"]
    allowed = {**_CUT_BY, "strip_accents": (None, lowercase)}
    for name, values in allowed.items():
        if given[name] not in values:
            raise InputError(
                f"{file} has {name} {given[name]!r}, which cuts text in another way "
                "than this library; give other weights, or remove that line to have "
                "it cut so."
            )
    return is_cased(vocabulary) if lowercase is None else not lowercase


def _read_run(folder: Path) -> tuple[BertConfig, dict[str, Any]]:
    """The encoder, and a head for spans, of a run's newest checkpoint."""
    command = run_folder.command_of(folder)
    abstract_of = _ABSTRACT.get(command)
    if abstract_of is None:
        raise InputError(
            f"{folder} holds a run of {command}; give one of {' or '.join(_ABSTRACT)}."
        )
    step = checkpoint.latest_step(folder)
    if step == 0:
        raise InputError(
            f"the run in {folder} has not trained a step; let it go on by --resume, or "
            "give another --start."
        )
    say(f"{folder}: the weights of step {step:,}")
    arrays = checkpoint.arrays_with_params(folder, step)
    config = _saved_sizes(folder)
    try:
        abstract = abstract_of(config)
        # NumPy arrays, whatever devices they were saved on; the optimizer's state is
        # left.
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), abstract)
        with ocp.PyTreeCheckpointer() as checkpointer:
            restored = checkpointer.restore(
                arrays,
                args=ocp.args.PyTreeRestore(
                    item={"params": abstract},
                    restore_args={"params": how},
                    partial_restore=True,
                ),
            )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"the checkpoint {arrays.parent} cannot be read ({error}); give another "
            "run as --start."
        ) from error
    params = restored["params"]
    params["bert"].pop("pooler", None)
    return config, {part: params[part] for part in ("bert", "span") if part in params}


def _saved_sizes(folder: Path) -> BertConfig:
    """The sizes with which a run's newest checkpoint was saved."""
    model = checkpoint.saved_model(folder, checkpoint.latest_step(folder))
    return BertConfig(**{n: value for n, value in model.items() if n != "optimizer"})
