"""The head that fine-tuning adds, beyond what Hugging Face's numbers show."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import SIZES, BertForQuestionAnswering, SpanBatch, span_loss

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
