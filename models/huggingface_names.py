"""The table of this model's parameters and Hugging Face's tensors.

A parameter is one tensor, or several that are joined along its last axis (queries,
keys and values); kernels are stored transposed. One table serves both directions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from flax import nnx

from models.bert import Bert, Encoder
from models.fine_tuning import BertForQuestionAnswering
from models.pretraining import BertForPreTraining
from models.stack import unstack_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from models.config import BertConfig

Architecture = Literal["BertModel", "BertForPreTraining", "BertForQuestionAnswering"]
"""Hugging Face's names of the models that there are here."""

Known = Architecture | Literal["Encoder"]
"""Those models, and `Encoder`: a `BertModel` without its pooler. Question answering
needs no pooler; the other models have one."""


class WeightsError(ValueError):
    """Weights, or their `config.json`, are not this model's; the message says how."""


Path = tuple[str | int, ...]
Names = tuple[str, ...]


def parameter_names(config: BertConfig, architecture: Known) -> dict[Path, Names]:
    """The tensors of each parameter, under Hugging Face's names.

    Args:
      config: The model's sizes.
      architecture: The model.

    Returns:
      A parameter's path in the tree of parameters, to the names of its tensors.

    Raises:
      WeightsError: The model has pre-LayerNorm, and Hugging Face's BERT has not.
    """
    if config.pre_norm:
        raise WeightsError(
            "Hugging Face's BERT has its LayerNorms after the sublayers, not before "
            "them as this model; its weights are for pre_norm=False."
        )
    return dict(_parameters(config.num_layers, architecture))


def shapes_of(config: BertConfig, architecture: Known) -> dict[str, Any]:
    """The shapes of a model's parameters, as a plain tree, a layer each.

    Args:
      config: The model's sizes; its `scan` is not looked at.
      architecture: The model.

    Returns:
      Nested dictionaries of `jax.ShapeDtypeStruct`.
    """
    model = {
        "Encoder": Encoder,
        "BertModel": Bert,
        "BertForPreTraining": BertForPreTraining,
        "BertForQuestionAnswering": BertForQuestionAnswering,
    }[architecture]
    config = replace(config, scan=False)
    abstract = nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(abstract, nnx.Param))


def tensors_of(
    params: Any, config: BertConfig, architecture: Known
) -> dict[str, np.ndarray]:
    """A tree of parameters under Hugging Face's names.

    Args:
      params: The parameters, or their gradients; a layer each, or stacked.
      config: The model's sizes.
      architecture: The model.

    Returns:
      Tensors by name, the tied decoder left out.
    """
    if config.scan:
        params = unstack_layers(params)
    tensors = {}
    for path, names in parameter_names(config, architecture).items():
        value = np.asarray(leaf_at(params, path))
        for name, part in zip(names, np.split(value, len(names), axis=-1), strict=True):
            # Contiguous: safetensors writes the memory that a view is of.
            tensors[name] = np.ascontiguousarray(turned(part, path))
    return tensors


def leaf_at(tree: Any, path: Path) -> Any:
    """The leaf of a nested dictionary at a path."""
    for key in path:
        tree = tree[key]
    return tree


def turned(value: np.ndarray, path: Path) -> np.ndarray:
    """A parameter in Hugging Face's orientation, or back."""
    return value.T if path[-1] == "kernel" else value


def _parameters(num_layers: int, architecture: Known) -> Iterator[tuple[Path, Names]]:
    prefix = () if architecture in ("BertModel", "Encoder") else ("bert",)
    pooler = architecture not in ("BertForQuestionAnswering", "Encoder")
    for path, names in _bert(num_layers, pooler):
        yield (*prefix, *path), tuple(".".join((*prefix, name)) for name in names)
    match architecture:
        case "BertForPreTraining":
            head = "cls.predictions"
            yield from _dense(("masked", "dense"), f"{head}.transform.dense")
            yield from _norm(("masked", "norm"), f"{head}.transform.LayerNorm")
            yield ("masked", "bias"), (f"{head}.bias",)
            yield from _dense(("next_sentence",), "cls.seq_relationship")
        case "BertForQuestionAnswering":
            yield from _dense(("span",), "qa_outputs")


def _bert(num_layers: int, pooler: bool) -> Iterator[tuple[Path, Names]]:
    for table in ("word", "position", "token_type"):
        path = ("embeddings", table, "embedding")
        yield path, (f"embeddings.{table}_embeddings.weight",)
    yield from _norm(("embeddings", "norm"), "embeddings.LayerNorm")
    for i in range(num_layers):
        path, name = ("layers", i), f"encoder.layer.{i}"
        attention, theirs = (*path, "attention"), f"{name}.attention"
        qkv = (f"{theirs}.self.{part}" for part in ("query", "key", "value"))
        yield from _dense((*attention, "qkv"), *qkv)
        yield from _dense((*attention, "out"), f"{theirs}.output.dense")
        yield from _norm((*path, "attention_norm"), f"{theirs}.output.LayerNorm")
        feed_forward = (*path, "feed_forward")
        yield from _dense((*feed_forward, "up"), f"{name}.intermediate.dense")
        yield from _dense((*feed_forward, "down"), f"{name}.output.dense")
        yield from _norm((*path, "feed_forward_norm"), f"{name}.output.LayerNorm")
    if pooler:
        yield from _dense(("pooler",), "pooler.dense")


def _dense(path: Path, *names: str) -> Iterator[tuple[Path, Names]]:
    yield (*path, "kernel"), tuple(f"{name}.weight" for name in names)
    yield (*path, "bias"), tuple(f"{name}.bias" for name in names)


def _norm(path: Path, name: str) -> Iterator[tuple[Path, Names]]:
    yield (*path, "scale"), (f"{name}.weight",)
    yield (*path, "bias"), (f"{name}.bias",)
