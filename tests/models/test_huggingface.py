"""Folders read as a BERT of Hugging Face's, and those refused by name."""

import dataclasses
import errno
import functools
import json
import os
import re
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from models import SIZES, WeightsError, huggingface
from models.huggingface import config_json, config_of
from models.huggingface_names import shapes_of, tensors_of

CONFIG = dataclasses.replace(
    SIZES["tiny"],
    vocab_size=30,
    hidden_size=8,
    intermediate_size=12,
    max_positions=16,
)
ARCHITECTURES = ("BertModel", "BertForPreTraining", "BertForQuestionAnswering")


shapes_once = functools.cache(shapes_of)


@pytest.fixture(autouse=True)
def _shapes_once(monkeypatch):
    """To find a model's shapes takes longer than all else of most tests."""
    monkeypatch.setattr(huggingface, "shapes_of", shapes_once)


def random_params(architecture):
    random = np.random.default_rng(5)
    return jax.tree.map(
        lambda x: random.normal(size=x.shape).astype(np.float32),
        shapes_once(CONFIG, architecture),
    )


@pytest.fixture
def tensors():
    return tensors_of(random_params("BertForPreTraining"), CONFIG, "BertForPreTraining")


def pretraining(tensors, config=CONFIG):
    return huggingface.to_params(tensors, config, "BertForPreTraining")


def assert_same(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_model_is_read_as_it_was_written(architecture, tmp_path):
    params = random_params(architecture)
    huggingface.write(tmp_path / "new", CONFIG, params, architecture)
    config, own = huggingface.read(tmp_path / "new", architecture)
    assert config == CONFIG
    assert_same(own, params)
    _, start = huggingface.read_for_spans(tmp_path / "new")
    bert = params.get("bert", params)
    theirs = {"bert": {key: bert[key] for key in ("embeddings", "layers")}}
    if architecture == "BertForQuestionAnswering":
        theirs["span"] = params["span"]
    assert_same(start, theirs)


def test_older_names_are_read(tensors):
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in tensors.items()
    }
    assert old.keys() != tensors.keys()
    old["bert.embeddings.position_ids"] = np.arange(16)[None]
    old["cls.predictions.decoder.weight"] = tensors[
        "bert.embeddings.word_embeddings.weight"
    ]
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    assert_same(pretraining(old), pretraining(tensors))


def test_the_prefix_may_be_there_or_not(tensors):
    bert = {name: value for name, value in tensors.items() if name.startswith("bert.")}
    bare = {name.removeprefix("bert."): value for name, value in bert.items()}
    expected = pretraining(tensors)["bert"]
    for given in (bert, bare):
        assert_same(huggingface.to_params(given, CONFIG, "BertModel"), expected)
    heads = {name: tensors[name] for name in tensors.keys() - bert.keys()}
    assert_same(pretraining({**bare, **heads}), pretraining(tensors))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_smaller_dtypes_are_widened(tensors, dtype, tmp_path):
    small = {name: value.astype(dtype) for name, value in tensors.items()}
    save_file(small, tmp_path / "model.safetensors")
    params = pretraining(huggingface.read_tensors(tmp_path / "model.safetensors"))
    bias = params["masked"]["bias"]
    assert bias.dtype == np.float32
    np.testing.assert_array_equal(
        bias, small["cls.predictions.bias"].astype(np.float32)
    )


def refused(match):
    return pytest.raises(WeightsError, match=match)


def test_missing_and_unknown_tensors_are_named(tensors):
    value = tensors.pop("bert.encoder.layer.1.output.dense.bias")
    with refused(r"they lack bert\.encoder\.layer\.1\.output\.dense\.bias; give"):
        pretraining(tensors)
    tensors["bert.encoder.layer.2.output.dense.bias"] = value
    with refused(r"lack .*layer\.1\.\S+ and have the unknown bert\.encoder\.layer\.2"):
        pretraining(tensors)


def test_another_architecture_is_refused(tensors):
    other = {
        name.replace("bert.", "distilbert."): value for name, value in tensors.items()
    }
    with refused("not those of BertForPreTraining .* unknown distilbert.embeddings"):
        pretraining(other)
    with refused(r"not those of BertForQuestionAnswering .* lack qa_outputs\.bias"):
        huggingface.to_params(tensors, CONFIG, "BertForQuestionAnswering")
    with refused("config.json has model_type 'roberta'"):
        config_of({"model_type": "roberta"})


def test_other_shapes_are_refused(tensors):
    name = "bert.pooler.dense.weight"
    wrong = {**tensors, name: tensors[name][:-1]}
    with refused(rf"{name} is \(7, 8\), and \(8, 8\) by config.json"):
        pretraining(wrong)
    # Wrong as it is stored, though right when it is turned.
    name = "bert.encoder.layer.0.output.dense.weight"
    wrong = {**tensors, name: tensors[name].T}
    with refused(rf"{name} is \(12, 8\), and \(8, 12\)"):
        pretraining(wrong)
    with refused("vocabulary of 30 word pieces .* and config.json one of 31"):
        pretraining(tensors, dataclasses.replace(CONFIG, vocab_size=31))


def test_what_is_no_weight_is_refused(tensors):
    name = "cls.predictions.bias"
    for dtype in (np.int32, np.float64):
        with refused(f"{name} is {np.dtype(dtype)}; weights must be float32"):
            pretraining({**tensors, name: tensors[name].astype(dtype)})
    with refused(f"{name} has values that are not finite"):
        pretraining({**tensors, name: np.full_like(tensors[name], np.nan)})
    tensors["cls.predictions.decoder.bias"] = tensors[name] + 1
    with refused(f"decoder.bias is not equal to {name}"):
        pretraining(tensors)


def test_a_name_in_both_forms_is_refused(tensors):
    norm = "bert.embeddings.LayerNorm"
    tensors[f"{norm}.gamma"] = tensors[f"{norm}.weight"]
    with refused(rf"have {norm}\.weight twice, once as {norm}\.gamma"):
        pretraining(tensors)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu' and this BERT has 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "has 'absolute'"),
        ({"is_decoder": True}, "is_decoder True"),
        ({"vocab_size": "many"}, "vocab_size 'many'; it must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0; it must be .* at least 1"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps nan"),
        ({"initializer_range": float("inf")}, "initializer_range inf"),
        ({"num_attention_heads": 7}, "describes no BERT: 7 heads do not divide"),
        ({"hidden_dropout_prob": 1.5}, "describes no BERT: dropout must be"),
    ],
)
def test_configurations_that_make_no_bert_are_refused(values, message):
    with refused(message):
        config_of(values)


def test_configuration_survives_the_round_trip():
    config = dataclasses.replace(CONFIG, layer_norm_epsilon=1e-7, dropout=0.2)
    values = json.loads(json.dumps(config_json(config, "BertModel")))
    assert config_of(values) == config
    assert config_of({}) == SIZES["base"]


HEADER = json.dumps({"x": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}})


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        (None, None, "config.json cannot be read"),
        ("{", None, "config.json is not JSON"),
        ("[" * 100_000, None, "config.json is not JSON"),
        ("[]", None, "config.json holds no settings"),
        ('{"vocab_size": 0}', None, "config.json has vocab_size 0"),
        ('{"num_attention_heads": 7}', None, "config.json describes no BERT"),
        ("{}", None, "model.safetensors cannot be read"),
        ("{}", struct.pack("<Q", 99) + b"{}", "no safetensors file, or damaged"),
        (
            "{}",
            struct.pack("<Q", len(HEADER)) + HEADER.encode() + b"\0",
            "a dtype that cannot be read",
        ),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, config, weights, message):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    with refused(re.escape(str(tmp_path)) + f".*{re.escape(message)}"):
        huggingface.read(tmp_path, "BertModel")


def test_others_can_read_what_is_written_and_it_is_whole_or_not_there(
    tmp_path, monkeypatch
):
    params = random_params("BertModel")
    huggingface.write(tmp_path, CONFIG, params, "BertModel")
    config, weights = (tmp_path / n for n in ("config.json", "model.safetensors"))
    assert weights.stat().st_mode == config.stat().st_mode
    before = weights.read_bytes()

    def full(path, content, **_):
        with path.open("wb") as file:
            file.write(content[:9] if isinstance(content, bytes) else b"")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(tmp_path), "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        huggingface.write(tmp_path, CONFIG, params, "BertModel")
    assert weights.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [config, weights]
    weights.unlink()
    monkeypatch.undo()
    monkeypatch.setattr(type(tmp_path), "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        huggingface.write(tmp_path, CONFIG, params, "BertModel")
    assert not weights.exists()
