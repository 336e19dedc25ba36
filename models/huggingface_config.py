"""Hugging Face's `config.json` of a BERT, and ours."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from models.config import BertConfig
from models.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_positions",
    "type_vocab_size": "num_token_types",
}

_NUMBERS = {
    "layer_norm_eps": "layer_norm_epsilon",
    "initializer_range": "initializer_range",
    "hidden_dropout_prob": "dropout",
}

# Settings that every BERT here has; Hugging Face's defaults are the same.
_FIXED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def config_of(values: Mapping[str, Any], file: str = "config.json") -> BertConfig:
    """Reads the contents of a `config.json`.

    Args:
      values: Its keys and values; what it lacks has BERT-Base's value, as in Hugging
        Face's library. The dropout of attention probabilities is not looked at.
      file: What messages call it.

    Returns:
      The model's sizes.

    Raises:
      WeightsError: It is of another architecture, or a value makes no model.

    Example:
      >>> from models.huggingface_config import config_of
      >>> config_of({"model_type": "bert", "num_hidden_layers": 2}).num_layers
      2
    """
    for key, value in _FIXED.items():
        given = values.get(key, value)
        if given != value:
            raise WeightsError(
                f"{file} has {key} {given!r} and this BERT has {value!r}; give "
                "weights of a BERT of that kind."
            )
    given: dict[str, Any] = {}
    for key, field in _SIZES.items():
        if key in values:
            given[field] = _number(f"{file} has {key}", values[key], int, 1)
    for key, field in _NUMBERS.items():
        if key in values:
            number = _number(f"{file} has {key}", values[key], (int, float), 0)
            given[field] = float(number)
    try:
        return BertConfig(**given)
    except ValueError as error:
        raise WeightsError(f"{file} describes no BERT: {error}") from error


def _number(what: str, value: Any, kind: Any, least: int) -> Any:
    # A NaN fails both comparisons; True is an int to Python.
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not least <= value < math.inf:
        number = "a whole number" if kind is int else "a number"
        raise WeightsError(
            f"{what} {value!r}; it must be {number} of at least {least}."
        )
    return value


def config_json(config: BertConfig, architecture: str) -> dict[str, Any]:
    """The contents of a `config.json`.

    Args:
      config: The model's sizes.
      architecture: Hugging Face's name of the model.

    Returns:
      What Hugging Face's library builds the same model from.
    """
    fields = {**_SIZES, **_NUMBERS}
    return {
        "architectures": [architecture],
        **_FIXED,
        **{key: getattr(config, field) for key, field in fields.items()},
        "attention_probs_dropout_prob": 0.0,
    }
