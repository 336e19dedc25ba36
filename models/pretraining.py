"""BERT's pre-training: the masked-language-model and next-sentence heads.

Shapes: B sequences, T tokens, P predicted positions, H hidden size, V word pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from flax import nnx

from models.bert import Bert
from models.losses import cross_entropy
from models.parts import LayerNorm, gelu, linear

if TYPE_CHECKING:
    from typing import Any

    from jaxtyping import Array, Float, Int, Key

    from models.config import BertConfig


class PreTrainingBatch(NamedTuple):
    """Masked sentence pairs.

    Made in NumPy, computed with in JAX. Every sequence has P places for predictions;
    those that it does not need have weight zero (and any position and label).

    Attributes:
      token_ids: Word pieces, some of them masked, (B, T).
      token_types: 0 for the first segment, 1 for the second, (B, T).
      lengths: Tokens before the padding, (B,).
      masked_positions: Where word pieces are to be predicted, (B, P).
      masked_labels: The word pieces that were there, (B, P).
      masked_weights: 1 for a prediction, 0 for an unused place, (B, P).
      next_sentence_labels: 0 when the second segment follows the first, 1 when it is
        from elsewhere, (B,).
    """

    token_ids: Int[Any, "B T"]
    token_types: Int[Any, "B T"]
    lengths: Int[Any, " B"]
    masked_positions: Int[Any, "B P"]
    masked_labels: Int[Any, "B P"]
    masked_weights: Float[Any, "B P"]
    next_sentence_labels: Int[Any, " B"]


class MaskedLanguageModelHead(nnx.Module):
    """decode(norm(gelu(dense(h)))) + bias; the decoder is the word embedding."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.dense = linear(config, config.hidden_size, config.hidden_size, rngs)
        self.norm = LayerNorm(config)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))

    def __call__(
        self, hidden: Float[Array, "B P H"], word: nnx.Embed
    ) -> Float[Array, "B P V"]:
        """Scores every word piece for each of the given states."""
        logits = word.attend(self.norm(gelu(self.dense(hidden))))
        bias = jnp.broadcast_to(self.bias[...], logits.shape)
        return logits + bias.astype(logits.dtype)


class BertForPreTraining(nnx.Module):
    """BERT with the two heads that it is pre-trained with.

    Args:
      config: The model's sizes.
      rngs: Source of the initial parameters.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.bert = Bert(config, rngs=rngs)
        self.masked = MaskedLanguageModelHead(config, rngs=rngs)
        self.next_sentence = linear(config, config.hidden_size, 2, rngs)

    def __call__(
        self,
        batch: PreTrainingBatch,
        keys: Key[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B P V"], Float[Array, "B 2"]]:
        """Predicts the masked word pieces and whether the segments follow each other.

        Args:
          batch: The sequences; their labels are not looked at.
          keys: A dropout key a sequence; without, the result is deterministic.

        Returns:
          Logits at the masked positions alone, and next-sentence logits, float32.
        """
        hidden, pooled = self.bert(
            batch.token_ids, batch.token_types, batch.lengths, keys
        )
        hidden = jnp.take_along_axis(hidden, batch.masked_positions[..., None], axis=1)
        masked = self.masked(hidden, self.bert.embeddings.word)
        next_sentence = self.next_sentence(pooled)
        return masked.astype(jnp.float32), next_sentence.astype(jnp.float32)


def pretraining_losses(
    masked: Float[Array, "B P V"],
    next_sentence: Float[Array, "B 2"],
    batch: PreTrainingBatch,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The two cross-entropies that pre-training adds up, each a mean.

    Args:
      masked: Logits at the masked positions.
      next_sentence: Next-sentence logits.
      batch: The labels and weights.

    Returns:
      The masked-language-model loss a prediction and the next-sentence loss a
      sequence, in nats.
    """
    masked = cross_entropy(masked, batch.masked_labels)
    weights = batch.masked_weights
    masked = jnp.sum(masked * weights) / jnp.maximum(jnp.sum(weights), 1.0)
    return masked, jnp.mean(cross_entropy(next_sentence, batch.next_sentence_labels))
