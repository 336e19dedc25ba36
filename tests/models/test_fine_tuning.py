"""The heads that fine-tuning adds, beyond what Hugging Face's numbers show."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import (
    SIZES,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    SpanBatch,
    classification_loss,
    span_loss,
)
from models.dropout import sequence_keys

TINY = dataclasses.replace(
    SIZES["tiny"], vocab_size=50, hidden_size=32, intermediate_size=64, max_positions=16
)
TOKENS = jax.random.randint(jax.random.key(2), (3, 12), 0, 50)
LENGTHS = jnp.array([12, 5, 9])


def compiled(model):
    graph, state = nnx.split(model)
    return jax.jit(lambda *inputs: nnx.merge(graph, state)(*inputs))


def test_a_spans_loss_is_the_mean_of_its_two_ends():
    starts, ends = jax.random.normal(jax.random.key(0), (2, 3, 12))
    batch = SpanBatch(
        TOKENS, TOKENS, LENGTHS, starts=jnp.array([0, 2, 3]), ends=jnp.array([0, 4, 8])
    )
    expected = np.mean(
        [
            -jax.nn.log_softmax(logits[i])[place]
            for logits, places in ((starts, batch.starts), (ends, batch.ends))
            for i, place in enumerate(places)
        ]
    )
    np.testing.assert_allclose(span_loss(starts, ends, batch), expected, rtol=1e-6)


def test_a_classifications_loss_is_the_mean_over_sequences():
    logits = jax.random.normal(jax.random.key(0), (2, 3))
    expected = -np.mean(
        [jax.nn.log_softmax(logits[0])[2], jax.nn.log_softmax(logits[1])[0]]
    )
    np.testing.assert_allclose(
        classification_loss(logits, jnp.array([2, 0])), expected, rtol=1e-6
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_float32_and_padding_is_not_looked_at(dtype):
    config = dataclasses.replace(TINY, dtype=dtype)
    types = jnp.zeros_like(TOKENS)
    is_padding = np.arange(12) >= np.asarray(LENGTHS)[:, None]
    other = jnp.where(is_padding, 3, TOKENS)
    span = compiled(BertForQuestionAnswering(config, rngs=nnx.Rngs(1)))
    for one, two in zip(
        span(TOKENS, types, LENGTHS), span(other, types, LENGTHS), strict=True
    ):
        assert one.dtype == jnp.float32
        np.testing.assert_array_equal(one[~is_padding], two[~is_padding])
        assert np.any(one[is_padding] != two[is_padding])
    model = compiled(BertForSequenceClassification(config, 4, rngs=nnx.Rngs(1)))
    logits = model(TOKENS, types, LENGTHS)
    assert (logits.dtype, logits.shape) == (jnp.float32, (3, 4))
    np.testing.assert_array_equal(logits, model(other, types, LENGTHS))


def test_a_classifier_drops_out_by_a_key_of_its_own(monkeypatch):
    seen = []

    def record(x, rate, keys):
        seen.append((x.shape, rate, jax.random.key_data(keys).tobytes()))
        return x

    monkeypatch.setattr("models.bert.dropout", record)
    monkeypatch.setattr("models.fine_tuning.dropout", record)
    keys = sequence_keys(jax.random.key(0), jnp.arange(3))
    model = BertForSequenceClassification(TINY, 2, rngs=nnx.Rngs(0))
    model(TOKENS, jnp.zeros_like(TOKENS), LENGTHS, keys)
    assert len({key for *_, key in seen}) == len(seen) == 2 + 2 * TINY.num_layers
    assert seen[-1][:2] == ((3, 32), TINY.dropout)


def test_answers_are_found_by_an_encoder_without_a_pooler():
    state = nnx.state(BertForQuestionAnswering(TINY, rngs=nnx.Rngs(0)), nnx.Param)
    assert nnx.to_pure_dict(state)["bert"].keys() == {"embeddings", "layers"}
