"""BERT's fine-tuning for answers that are spans of a text.

Shapes: B sequences, T tokens, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from flax import nnx

from models.bert import Encoder
from models.losses import cross_entropy
from models.parts import linear

if TYPE_CHECKING:
    from typing import Any

    from jaxtyping import Array, Float, Int, Key

    from models.config import BertConfig


class SpanBatch(NamedTuple):
    """Questions, each with a window of the text that may hold its answer.

    Made in NumPy, computed with in JAX.

    Attributes:
      token_ids: Word pieces, (B, T).
      token_types: 0 for the question, 1 for the text, (B, T).
      lengths: Tokens before the padding, (B,).
      starts: First token of the answer, 0 where the window does not hold it, (B,).
      ends: Last token of the answer, likewise, (B,).
    """

    token_ids: Int[Any, "B T"]
    token_types: Int[Any, "B T"]
    lengths: Int[Any, " B"]
    starts: Int[Any, " B"]
    ends: Int[Any, " B"]


class BertForQuestionAnswering(nnx.Module):
    """BERT with a head that points at the first and the last token of an answer.

    Args:
      config: The model's sizes.
      rngs: Source of the initial parameters.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.bert = Encoder(config, rngs=rngs)
        self.span = linear(config, config.hidden_size, 2, rngs)

    def __call__(
        self,
        token_ids: Int[Array, "B T"],
        token_types: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        keys: Key[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """Scores every token as the answer's first and as its last.

        Args:
          token_ids: Word pieces.
          token_types: 0 for the question, 1 for the text.
          lengths: Tokens before the padding.
          keys: A dropout key a sequence; without, the result is deterministic.

        Returns:
          Start and end logits, float32; those of the padding mean nothing.
        """
        hidden = self.bert.encode(token_ids, token_types, lengths, keys)
        logits = self.span(hidden).astype(jnp.float32)
        return logits[..., 0], logits[..., 1]


def span_loss(
    starts: Float[Array, "B T"],
    ends: Float[Array, "B T"],
    batch: SpanBatch,
) -> Float[Array, ""]:
    """The mean cross-entropy of the first and the last token, in nats.

    As in BERT's published code, every place of a sequence can be pointed at, padding
    too.

    Args:
      starts: Start logits.
      ends: End logits.
      batch: The answers.

    Returns:
      The mean over sequences of half the sum of the two.
    """
    start = cross_entropy(starts, batch.starts)
    end = cross_entropy(ends, batch.ends)
    return jnp.mean(start + end) / 2
