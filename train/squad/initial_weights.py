"""Weights that fine-tuning starts from, and their vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from models import SIZES, BertConfig, WeightsError, huggingface
from train.bert.objective import abstract_params
from train.core import checkpoint, run_folder
from train.core.errors import InputError
from train.core.output import say
from train.data import model_folder
from train.data.vocabulary import is_cased, read_vocabulary
from train.squad.task import abstract_params as abstract_span_params

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


def random_weights(vocab: Path, model: Size) -> InitialWeights:
    """No weights, but the sizes of a BERT by its name, with a vocabulary."""
    vocabulary = read_vocabulary(vocab)
    config = replace(SIZES[model], vocab_size=len(vocabulary))
    return InitialWeights(config, vocabulary, {}, is_cased(vocabulary))


def read_weights(folder: Path, vocab: Path | None = None) -> InitialWeights:
    """Reads weights in Hugging Face's layout, or of a run, and their vocabulary.

    The vocabulary is the one in the folder where no other is given.

    Raises:
      InputError: The folder holds neither weights nor a run of `train.pretrain` or
        `train.squad`, a file in it cannot be used, its tokenizer cuts text in another
        way, or its weights have one type of tokens or do not fit the vocabulary.
    """
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}; names of Hugging Face's Hub are not "
            f"fetched: give as --start a folder with its {_FILES}, downloaded."
        )
    config, params = _read_folder(folder)
    if config.num_token_types < 2:
        raise InputError(
            f"the weights in {folder} have one type of tokens, by which question and "
            "text cannot be told apart; give weights with two."
        )
    vocab = vocab or folder / model_folder.VOCABULARY
    vocabulary = read_vocabulary(vocab)
    if len(vocabulary) != config.vocab_size:
        raise InputError(
            f"the vocabulary {vocab} has {len(vocabulary):,} word pieces and the "
            f"weights in {folder} have {config.vocab_size:,}; give --vocab theirs."
        )
    return InitialWeights(config, vocabulary, params, _is_cased(folder, vocabulary))


def read_resumed(folder: Path) -> InitialWeights | None:
    """Sizes and vocabulary that a run of `train.squad` goes on with.

    The weights are in the run's checkpoint; None where there is none yet.
    """
    if not checkpoint.exist(folder):
        return None
    vocabulary = read_vocabulary(folder / model_folder.VOCABULARY)
    sizes = _saved_sizes(folder)
    return InitialWeights(sizes, vocabulary, {}, _is_cased(folder, vocabulary))


def trained_tokens(folder: Path) -> int | None:
    """The tokens of the longest sequences of a run; None for weights of elsewhere."""
    if not any(run_folder.is_of(folder, command) for command in _ABSTRACT):
        return None
    flags = run_folder.flags_of(folder)
    long = flags.get("long_seq")
    is_long = long and checkpoint.latest_step(folder) > flags["steps"]
    return long if is_long else flags["seq"]


def _read_folder(folder: Path) -> tuple[BertConfig, dict[str, Any]]:
    """The weights of a folder of either kind."""
    if (folder / huggingface.WEIGHTS).exists():
        try:
            return huggingface.read_for_spans(folder)
        except WeightsError as error:
            raise InputError(str(error)) from error
    if checkpoint.exist(folder):
        return _read_run(folder)
    raise InputError(
        f"{folder} holds no weights; give as --start a folder with {_FILES}, which "
        "transformers' save_pretrained makes of a pytorch_model.bin, or a run of "
        "train.pretrain that has a checkpoint."
    )


def _read_run(folder: Path) -> tuple[BertConfig, dict[str, Any]]:
    """The encoder, and a head for spans, of a run's newest checkpoint."""
    command = run_folder.command_of(folder)
    if command not in _ABSTRACT:
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
    config = _saved_sizes(folder)
    params = checkpoint.saved_params(folder, step, _ABSTRACT[command](config))
    params["bert"].pop("pooler", None)
    return config, {part: params[part] for part in ("bert", "span") if part in params}


def _saved_sizes(folder: Path) -> BertConfig:
    """The sizes with which a run's newest checkpoint was saved."""
    model = checkpoint.saved_model(folder, checkpoint.latest_step(folder))
    return BertConfig(**{n: value for n, value in model.items() if n != "optimizer"})


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
