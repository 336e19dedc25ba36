"""Weights from and for Hugging Face: a folder of `config.json`, `model.safetensors`.

The names are those of transformers' `BertModel` and its heads; files of older releases
(`gamma` and `beta`, no `bert.` prefix, a copy of the tied decoder) are read as well.
"""

from __future__ import annotations

import json
import math
import pathlib
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from models.config import BertConfig
from models.huggingface_names import (
    WeightsError,
    leaf_at,
    parameter_names,
    shapes_of,
    tensors_of,
    turned,
)
from models.stack import stack_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from models.huggingface_names import Architecture, Known, Path

CONFIG = "config.json"
WEIGHTS = "model.safetensors"

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

_WORD = "embeddings.word_embeddings.weight"
_RENAMED = {
    ".LayerNorm.gamma": ".LayerNorm.weight",
    ".LayerNorm.beta": ".LayerNorm.bias",
}
_TIED = {
    "cls.predictions.decoder.weight": f"bert.{_WORD}",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
_OTHER_HEADS = ("cls.", "classifier.", "bert.pooler.")
_NAMED = 4


def read(
    folder: str | pathlib.Path, architecture: Architecture
) -> tuple[BertConfig, dict[str, Any]]:
    """Reads a model.

    Args:
      folder: Where `config.json` and `model.safetensors` are.
      architecture: The model; the weights must be exactly its own.

    Returns:
      The model's sizes and its parameters, nested dictionaries of float32 arrays.

    Raises:
      WeightsError: A file cannot be read, or is not of this model.
    """
    folder = pathlib.Path(folder)
    config = read_config(folder / CONFIG)
    return config, to_params(read_tensors(folder / WEIGHTS), config, architecture)


def read_for_spans(folder: pathlib.Path) -> tuple[BertConfig, dict[str, Any]]:
    """Reads what fine-tuning for spans starts from: any BERT.

    Args:
      folder: Where `config.json` and `model.safetensors` are.

    Returns:
      The model's sizes and the parameters of a `BertForQuestionAnswering`, without
      those of its head, `span`, where the weights have none.

    Raises:
      WeightsError: A file cannot be read, or is not of a BERT.
    """
    config = read_config(folder / CONFIG)
    tensors = {
        name: tensor
        for name, tensor in _canonical(read_tensors(folder / WEIGHTS)).items()
        if not name.startswith(_OTHER_HEADS)
    }
    if any(name.startswith("qa_outputs.") for name in tensors):
        return config, to_params(tensors, config, "BertForQuestionAnswering")
    return config, {"bert": to_params(tensors, config, "Encoder")}


def write(
    folder: pathlib.Path,
    config: BertConfig,
    params: Any,
    architecture: Architecture,
) -> None:
    """Writes what `read` reads, and transformers' `from_pretrained` too.

    Args:
      folder: Where to; it is made if need be.
      config: The model's sizes.
      params: Its parameters.
      architecture: The model.

    Raises:
      WeightsError: The model has pre-LayerNorm, and Hugging Face's BERT has not.
      OSError: The folder cannot be written to; the weights in it are as they were.
    """
    tensors = tensors_of(params, config, architecture)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_json(config, architecture), indent=2) + "\n"
    # Before the weights, whose presence says that all is there.
    (folder / CONFIG).write_text(text, encoding="utf-8")
    # transformers reads only files that say whose layout they have.
    content = save(tensors, metadata={"format": "pt"})
    # Not save_file, whose file nobody else can read and whose errors are no OSErrors.
    new = folder / f"{WEIGHTS}.new"
    try:
        new.write_bytes(content)
        new.replace(folder / WEIGHTS)
    finally:  # what a full disk has left of it
        new.unlink(missing_ok=True)


def read_config(path: pathlib.Path) -> BertConfig:
    """Reads a `config.json`.

    Args:
      path: The file.

    Returns:
      The model's sizes.

    Raises:
      WeightsError: It cannot be read, or is not of a BERT.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be read ({error.strerror}); give a folder with "
            f"{CONFIG} and {WEIGHTS}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not JSON ({error}); get it anew.") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} holds no settings of a model; get it anew.")
    return config_of(values, str(path))


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
      >>> from models.huggingface import config_of
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


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads a safetensors file.

    Args:
      path: The file.

    Returns:
      Its tensors by name.

    Raises:
      WeightsError: It cannot be read, or is damaged.
    """
    try:
        return load_file(path)
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be read ({error}); give a folder with {CONFIG} and "
            f"{WEIGHTS}."
        ) from error
    except SafetensorError as error:
        raise WeightsError(
            f"{path} is no safetensors file, or damaged ({error}); get it anew."
        ) from error
    except (AttributeError, KeyError) as error:  # NumPy has no dtype of that name
        raise WeightsError(
            f"{path} has tensors of a dtype that cannot be read ({error}); give "
            "weights of float32, bfloat16 or float16."
        ) from error


def to_params(
    tensors: Mapping[str, np.ndarray],
    config: BertConfig,
    architecture: Known,
) -> dict[str, Any]:
    """Makes a model's parameters of Hugging Face's tensors.

    Args:
      tensors: Tensors by name; any floating-point dtype of at most 32 bits.
      config: The model's sizes.
      architecture: The model; the tensors must be exactly its own.

    Returns:
      Nested dictionaries of float32 arrays, in the form that `config.scan` asks for.

    Raises:
      WeightsError: Tensors are missing, unknown, of another shape or dtype, or not
        finite.
    """
    tensors = _canonical(tensors)
    if architecture in ("BertModel", "Encoder"):
        tensors = {name.removeprefix("bert."): x for name, x in tensors.items()}
    names = parameter_names(config, architecture)
    _check_names(
        tensors.keys(), [n for own in names.values() for n in own], architecture
    )
    shapes = shapes_of(config, architecture)
    params: dict[Any, Any] = {}
    for path, own in names.items():
        shape = leaf_at(shapes, path).shape
        shape = (*shape[:-1], shape[-1] // len(own))
        parts = [_checked(name, tensors[name], path, shape) for name in own]
        *branch, last = path
        tree = params
        for key in branch:
            tree = tree.setdefault(key, {})
        tree[last] = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    return stack_layers(params) if config.scan else params


def _canonical(
    tensors: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Today's names, with the prefix, without buffers and copies of tied tensors."""
    named: dict[str, Any] = {}
    for name, tensor in tensors.items():
        new = name
        for old, today in _RENAMED.items():
            if name.endswith(old):
                new = name.removesuffix(old) + today
        if new.startswith(("embeddings.", "encoder.", "pooler.")):
            new = f"bert.{new}"
        if new in named:
            raise WeightsError(
                f"the weights have {new} twice, once as {name}; remove either."
            )
        named[new] = tensor
    for name in _BUFFERS:
        named.pop(name, None)
    for copy, name in _TIED.items():
        if copy not in named:
            continue
        value = named.pop(copy)
        if not np.array_equal(named.setdefault(name, value), value):
            raise WeightsError(
                f"{copy} is not equal to {name}, and this model has one tensor for "
                "both; give weights whose decoder is tied."
            )
    return named


def _check_names(
    found: Iterable[str], expected: Iterable[str], architecture: str
) -> None:
    known, there = set(expected), set(found)
    missing = [name for name in sorted(known) if name not in there]
    unknown = [name for name in sorted(there) if name not in known]
    wrong = [
        f"{what} {_some(names)}"
        for what, names in (("lack", missing), ("have the unknown", unknown))
        if names
    ]
    if wrong:
        raise WeightsError(
            f"the weights are not those of {architecture} with the sizes in {CONFIG}: "
            f"they {' and '.join(wrong)}; give the weights and {CONFIG} of one."
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown + (f", {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _checked(
    name: str,
    tensor: np.ndarray,
    path: Path,
    shape: tuple[int, ...],
) -> np.ndarray:
    if not (jnp.issubdtype(tensor.dtype, jnp.floating) and tensor.itemsize <= 4):
        raise WeightsError(
            f"{name} is {tensor.dtype}; weights must be float32, bfloat16 or float16."
        )
    expected = shape[::-1] if path[-1] == "kernel" else shape
    if tensor.shape == expected:
        values = tensor.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise WeightsError(
                f"{name} has values that are not finite; get the weights anew."
            )
        return turned(values, path)
    if name.endswith(_WORD) and tensor.shape[1:] == expected[1:]:
        raise WeightsError(
            f"the weights have a vocabulary of {tensor.shape[0]:,} word pieces "
            f"({name} is {tensor.shape}) and {CONFIG} one of {expected[0]:,}; "
            f"give the weights and {CONFIG} of one model."
        )
    raise WeightsError(
        f"{name} is {tensor.shape}, and {expected} by {CONFIG}; give the weights and "
        f"{CONFIG} of one model."
    )
