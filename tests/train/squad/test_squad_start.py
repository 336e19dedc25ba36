"""The weights that fine-tuning starts from, of Hugging Face's layout and of runs."""

import dataclasses
import json
import shutil
from functools import partial

import chex
import numpy as np
import pytest
from fine_tuning import encoder_of, run, write_squad, write_weights
from flax import nnx
from launching import arrays_of
from runs import SMALL, resume, small_config, steps_of, train, write_corpus

import onebit_jax
from models import Encoder, huggingface
from train.core.errors import InputError
from train.core.optimizer import OPTIMIZERS
from train.data.model_folder import TOKENIZER
from train.squad.initial_weights import read_weights, trained_tokens
from train.squad.task import init_params

# At an error Orbax closes the event loop that its other reads answer to.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


def test_fine_tuning_starts_from_hugging_faces_weights(files):
    vocabulary = (files.vocab).read_text().splitlines()
    folder = write_weights(files)
    config, encoder = encoder_of(files)
    weights = read_weights(folder, files.vocab)
    assert weights.config == config
    assert weights.params.keys() == {"bert", "span"}
    chex.assert_trees_all_equal(weights.params["bert"], encoder)
    # Learnt before, the head is no random one.
    begun = init_params(config, 0, weights.params)
    assert not begun["span"]["kernel"].any()
    files.vocab.write_text("\n".join([*vocabulary, "more"]) + "\n")
    match = (
        rf"has {len(vocabulary) + 1} word pieces and the weights .* {len(vocabulary)};"
    )
    with pytest.raises(InputError, match=match):
        read_weights(folder, files.vocab)


def pretrained(folder, **flags):
    """The flags of a short run of pre-training."""
    corpus = folder / "corpus"
    corpus.mkdir()
    small = {"freeze_step": 1, "warmup_steps": 1, "workers": 2, "compare": False}
    small |= {"out": folder / "pretrained", **flags}
    config = dataclasses.replace(small_config(write_corpus(corpus)), **small)
    train(config)
    return config


@pytest.mark.slow
def test_fine_tuning_starts_from_a_pretraining_run(tmp_path, capsys):
    config = pretrained(tmp_path, pre_norm=True, steps=2)
    weights = read_weights(config.out)
    assert weights.config.num_layers == SMALL.num_layers
    assert weights.config.pre_norm
    model = Encoder(weights.config, rngs=nnx.Rngs(0))
    random = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    chex.assert_trees_all_equal_shapes_and_dtypes(weights.params["bert"], random)
    scale = weights.params["bert"]["embeddings"]["norm"]["scale"]
    moved = np.abs(scale - np.ones_like(scale))
    assert 0 < moved.max() < 0.1  # two steps from where it began

    files = write_squad(tmp_path)
    tuned = dataclasses.replace(files, start=config.out, vocab=None, steps=1, seq=24)
    faster = {"dtype": "bfloat16", "remat": "layer"}
    run(tuned, freeze_step=None, **faster)
    said = capsys.readouterr().out
    begun = "was trained on 16 tokens: the positions from there to --seq 24 begin as"
    assert f"{config.out} {begun}" in said
    assert f"{config.out}: the weights of step 2" in said
    # Hugging Face's BERT has no Pre-LayerNorm.
    assert "weights are in the checkpoints" in said
    assert not (files.out / "model").exists()
    assert (files.out / "scores.json").exists()
    for data in (config.out / "checkpoints" / "2" / "arrays").rglob("d/*"):
        if data.stat().st_size > 1e4:  # the parameters and the state, not their index
            data.write_bytes(data.read_bytes()[:9])
    with pytest.raises(InputError, match=r"the checkpoint .*/2 is damaged"):
        read_weights(config.out)


@pytest.mark.slow
def test_fine_tuning_starts_from_what_workers_last_agreed_on(tmp_path, monkeypatch):
    alone = partial(onebit_jax.zero_one_adam, sync=onebit_jax.every(5))
    optimizer = OPTIMIZERS["zero_one_adam"]._replace(make=alone)
    monkeypatch.setitem(OPTIMIZERS, "zero_one_adam", optimizer)
    config = pretrained(tmp_path, optimizer="zero_one_adam", steps=4, warmup_bits=8)
    assert steps_of(config.out)[-1]["stage"] == "local"
    saved = arrays_of(config.out, 4)
    leaf = "bert.embeddings.norm.scale"
    (own,) = (x for k, x in saved.items() if "moved" in k and leaf in k)
    assert own.any()
    begun = read_weights(config.out).params
    np.testing.assert_array_equal(
        begun["bert"]["embeddings"]["norm"]["scale"], saved[f"params.{leaf}"]
    )
    # The folder for others holds the same, and the heads, and is made where it is gone.
    model = config.out / "model"
    of_model = read_weights(model)
    assert of_model.vocabulary == read_weights(config.out).vocabulary
    chex.assert_trees_all_equal(of_model.params, begun)
    _, params = huggingface.read(model, "BertForPreTraining")
    assert params["masked"]["bias"].any()
    shutil.rmtree(model)
    resume(config.out)
    again = huggingface.read(model, "BertForPreTraining")[1]
    chex.assert_trees_all_equal(again, params)


@pytest.mark.parametrize(("step", "tokens"), [(4, 16), (5, 32)])
def test_a_second_phase_has_trained_its_positions_once_it_has_begun(
    tmp_path, step, tokens
):
    flags = {"seq": 16, "steps": 4, "long_seq": 32}
    run = {"command": "train.pretrain", "flags": flags}
    (tmp_path / "config.json").write_text(json.dumps(run))
    (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    assert trained_tokens(tmp_path) == tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "has tokenizer_class 'BertJap"),
        ({"do_lower_case": "false"}, "has do_lower_case 'false'"),
        ({"do_lower_case": True, "strip_accents": False}, "has strip_accents False"),
        ({"tokenize_chinese_chars": False}, "has tokenize_chinese_chars False"),
    ],
)
def test_a_tokenizer_that_cuts_in_another_way_is_refused(files, settings, message):
    folder = write_weights(files)
    (folder / TOKENIZER).write_text(json.dumps(settings))
    with pytest.raises(InputError, match=message):
        read_weights(folder, files.vocab)
    same = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (folder / TOKENIZER).write_text(json.dumps({**same, "strip_accents": False}))
    assert read_weights(folder, files.vocab).cased


def test_weights_with_one_type_of_tokens_are_refused(files):
    folder = write_weights(files, num_token_types=1)
    with pytest.raises(InputError, match="have one type of tokens"):
        read_weights(folder, files.vocab)
