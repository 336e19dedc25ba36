"""BERT has its published sizes, and drops out fairly."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import special

from models import (
    SIZES,
    Bert,
    BertForPreTraining,
    PreTrainingBatch,
    pretraining_losses,
)
from models.dropout import dropout, sequence_keys

TINY = dataclasses.replace(
    SIZES["tiny"], vocab_size=50, hidden_size=32, intermediate_size=64, max_positions=16
)


def test_unused_places_weigh_nothing():
    batch = PreTrainingBatch(
        token_ids=np.ones((2, 8), np.int32),
        token_types=np.zeros((2, 8), np.int32),
        lengths=np.array([8, 8], np.int32),
        masked_positions=np.array([[1, 0], [2, 3]], np.int32),
        masked_labels=np.array([[4, 0], [5, 6]], np.int32),
        masked_weights=np.array([[1, 0], [1, 1]], np.float32),
        next_sentence_labels=np.array([0, 1], np.int32),
    )
    losses, unsure = jax.jit(pretraining_losses), np.zeros((2, 2), np.float32)
    logits = np.random.default_rng(0).normal(size=(2, 2, 9)).astype(np.float32)
    surprise = -special.log_softmax(logits, axis=-1)
    expected = np.mean([surprise[0, 0, 4], surprise[1, 0, 5], surprise[1, 1, 6]])
    masked, next_sentence = losses(logits, unsure, batch)
    np.testing.assert_allclose(masked, expected, rtol=1e-6)
    np.testing.assert_allclose(next_sentence, np.log(2), rtol=1e-6)
    nothing = batch._replace(masked_weights=np.zeros((2, 2), np.float32))
    assert losses(logits, unsure, nothing)[0] == 0


@pytest.mark.parametrize(
    ("size", "millions"),
    # Turc et al. 2019, table 1; Devlin et al. 2018, section 3 (both rounded there).
    [("tiny", 4.4), ("mini", 11.3), ("small", 29.1), ("medium", 41.7), ("base", 110)],
)
def test_published_sizes_have_published_parameter_counts(size, millions):
    abstract = nnx.eval_shape(lambda: Bert(SIZES[size], rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(abstract, nnx.Param))
    assert sum(leaf.size for leaf in leaves) / 1e6 == pytest.approx(millions, rel=0.02)


def test_parameters_start_as_berts():
    params = nnx.to_pure_dict(nnx.state(Bert(TINY, rngs=nnx.Rngs(0)), nnx.Param))
    kernel = params["layers"][0]["attention"]["qkv"]["kernel"]
    assert np.abs(kernel).max() <= 0.04 + 1e-7
    assert kernel.std() == pytest.approx(0.88 * 0.02, rel=0.05)
    assert not np.any(params["pooler"]["bias"])
    assert np.all(params["embeddings"]["norm"]["scale"] == 1)


def compiled(config):
    """The model with its initial parameters, as one function."""
    graph, state = nnx.split(BertForPreTraining(config, rngs=nnx.Rngs(0)))
    return jax.jit(lambda *inputs: nnx.merge(graph, state)(*inputs)), state


def test_computing_in_bfloat16_keeps_parameters_and_logits_in_float32(pretraining_case):
    batch, key = pretraining_case
    model, state = compiled(dataclasses.replace(TINY, dtype="bfloat16"))
    exact, exact_state = compiled(TINY)
    chex.assert_trees_all_equal_dtypes(
        nnx.to_pure_dict(state), nnx.to_pure_dict(exact_state)
    )
    # Close, and computed in another precision all the same.
    for ours, theirs in zip(model(batch), exact(batch), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, atol=0.05)
        assert np.any(ours != theirs)
    keys = sequence_keys(key, jnp.arange(4))
    assert model(batch, keys)[0].dtype == jnp.float32


@pytest.fixture
def pretraining_case():
    tokens = jax.random.randint(jax.random.key(5), (4, 16), 0, 50)
    batch = PreTrainingBatch(
        token_ids=tokens,
        token_types=jnp.zeros_like(tokens),
        lengths=jnp.full(4, 16),
        masked_positions=jnp.ones((4, 2), jnp.int32),
        masked_labels=tokens[:, 1:3],
        masked_weights=jnp.ones((4, 2)),
        next_sentence_labels=jnp.zeros(4, jnp.int32),
    )
    return batch, jax.random.key(6)


def test_embeddings_and_both_halves_of_each_layer_drop_out_by_keys_of_their_own(
    pretraining_case, monkeypatch
):
    batch, key = pretraining_case
    seen = []

    def record(x, rate, keys):
        seen.append((x.shape, rate, jax.random.key_data(keys).tobytes()))
        return x

    monkeypatch.setattr("models.bert.dropout", record)
    keys = sequence_keys(key, jnp.arange(4))
    model = Bert(TINY, rngs=nnx.Rngs(0))
    model(batch.token_ids, batch.token_types, batch.lengths, keys)
    assert len(set(seen)) == len(seen) == 1 + 2 * TINY.num_layers
    assert {(shape, rate) for shape, rate, _ in seen} == {((4, 16, 32), TINY.dropout)}


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_its_share_and_keeps_the_mean(rate):
    keys = sequence_keys(jax.random.key(3), jnp.arange(8))
    x = jnp.ones((8, 101, 99))
    y = np.asarray(dropout(x, rate, keys))
    deviation = np.sqrt(rate * (1 - rate) / x.size)
    assert np.mean(y == 0) == pytest.approx(rate, abs=5 * deviation)
    assert y.max() == pytest.approx(1 / (1 - rate), rel=1e-4)
    assert len(np.unique(y)) == 2
    # Neighbouring elements share random words; their fates must not be related.
    dropped = y.reshape(8, -1) == 0
    both = np.mean(dropped[:, :-1] & dropped[:, 1:])
    assert both == pytest.approx(rate**2, abs=5 * rate / np.sqrt(x.size))
    assert dropout(x, rate, None) is x
    assert dropout(x, 0.0, keys) is x


def test_sequences_longer_than_the_positions_are_refused():
    tokens = jnp.zeros((1, 17), jnp.int32)
    with pytest.raises(ValueError, match="17 tokens do not fit the 16 positions"):
        Bert(TINY, rngs=nnx.Rngs(0))(tokens, tokens, jnp.array([17]))


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="5 heads do not divide a hidden size of 32"):
        dataclasses.replace(TINY, num_heads=5)
    with pytest.raises(ValueError, match="dropout must be in"):
        dataclasses.replace(TINY, dropout=1.0)
    with pytest.raises(ValueError, match="remat is one of none, attention, dots"):
        dataclasses.replace(TINY, remat="everything")
