"""A decoder-only language model: pre-norm, rotary positions, RMSNorm, SwiGLU.

Shapes: B sequences, T tokens, H hidden size, N heads, D = H / N, V tokens of the
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import attend
from models.config import TransformerConfig
from models.dropout import dropout, fold_in
from models.losses import cross_entropy
from models.parts import embed, linear
from models.remat import recomputed

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Key

    from models.config import Attention, Remat

DecoderSize = Literal["nano", "tiny", "mini", "small", "base", "large"]
"""The names of `DECODER_SIZES`."""


@dataclass(frozen=True)
class DecoderConfig(TransformerConfig):
    """The shape of a decoder.

    Attributes:
      vocab_size: Rows of the embedding; by default the values of a byte.
      dropout: Share of the activations dropped while training.
      tied: Whether the head is the embedding; else it has weights of its own.
      norm_epsilon: Added to the mean square in every RMSNorm.
      rotary_base: Base of the positions' wavelengths: pair i of a head of size D turns
        once in 2π · rotary_base^(2i/D) tokens.
    """

    vocab_size: int = 256
    dropout: float = 0.0
    tied: bool = True
    norm_epsilon: float = 1e-6
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        """Refuses what cannot be built."""
        super().__post_init__()
        if self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"rotary positions turn pairs of values, and heads of size "
                f"{self.hidden_size // self.num_heads} have one left; choose another "
                "num_heads."
            )


def _size(num_layers: int, hidden_size: int, num_heads: int) -> DecoderConfig:
    # With three matrices instead of two, 8/3 of the hidden size is as large as 4.
    width = -(-8 * hidden_size // (3 * 64)) * 64
    return DecoderConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=width,
    )


DECODER_SIZES = MappingProxyType(
    {
        "nano": _size(2, 64, 2),
        "tiny": _size(4, 128, 4),
        "mini": _size(6, 256, 4),
        "small": _size(8, 512, 8),
        "base": _size(12, 768, 12),
        "large": _size(24, 1024, 16),
    }
)
"""Sizes by name; Base and Large have the layers of GPT-2's first two."""


class RMSNorm(nnx.Module):
    """x / √(mean(x²) + ε) · scale, in float32 whatever x is.

    References:
      Zhang and Sennrich, `Root Mean Square Layer Normalization
      <https://arxiv.org/abs/1910.07467>`_, 2019
    """

    def __init__(self, config: DecoderConfig):
        self.epsilon = config.norm_epsilon
        self.scale = nnx.Param(jnp.ones(config.hidden_size))

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        """Normalises the last axis."""
        return _normalised(x, self.scale[...], self.epsilon)


# As of `models.parts.LayerNorm`: computed again in the backward pass.
@partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def _normalised(
    x: Float[Array, "... H"], scale: Float[Array, " H"], epsilon: float
) -> Float[Array, "... H"]:
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normal = x32 * jax.lax.rsqrt(mean_square + epsilon)
    return (normal * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)


def rotate(
    x: Float[Array, "B T N D"], positions: Int[Array, " T"], base: float
) -> Float[Array, "B T N D"]:
    """Turns pairs of values by angles that grow with the position.

    The product of a query and a key, both turned, depends on the distance of their
    positions alone. Pair i, the values i and i + D/2, turns by base^(-2i/D) a token.

    Args:
      x: Queries or keys.
      positions: The place of each token.
      base: Base of the wavelengths.

    Returns:
      An array like `x`.

    References:
      Su et al., `RoFormer: Enhanced Transformer with Rotary Position Embedding
      <https://arxiv.org/abs/2104.09864>`_, 2021
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.outer(positions.astype(jnp.float32), frequencies)
    cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class CausalAttention(nnx.Module):
    """Multi-head attention of each token to itself and to those before it."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.base = config.rotary_base
        self.implementation: Attention = config.attention
        self.recompute = config.remat == "attention"
        self.qkv = linear(config, size, 3 * size, rngs, use_bias=False)
        self.out = linear(config, size, size, rngs, residual=True, use_bias=False)

    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """Mixes each sequence's tokens."""
        batch, length, hidden = x.shape
        qkv = self.qkv(x).reshape(  # (B, T, 3, N, D)
            batch, length, 3, self.num_heads, hidden // self.num_heads
        )
        positions = jnp.arange(length)
        q, k = (rotate(qkv[:, :, i], positions, self.base) for i in range(2))
        mix = partial(attend, is_causal=True, implementation=self.implementation)
        if self.recompute:
            mix = jax.checkpoint(mix)
        return self.out(mix(q, k, qkv[:, :, 2]).reshape(batch, length, hidden))


class GatedFeedForward(nnx.Module):
    """down(silu(gate(x)) · up(x)), the SwiGLU.

    References:
      Shazeer, `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_,
      2020: at equal size better than GELU.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        size, width = config.hidden_size, config.intermediate_size
        self.gate = linear(config, size, width, rngs, use_bias=False)
        self.up = linear(config, size, width, rngs, use_bias=False)
        self.down = linear(config, width, size, rngs, residual=True, use_bias=False)

    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """Transforms each token on its own."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """x ← x + f(norm(x)) with attention as f, then with the feed-forward layer."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.rate = config.dropout
        self.attention = CausalAttention(config, rngs=rngs)
        self.attention_norm = RMSNorm(config)
        self.feed_forward = GatedFeedForward(config, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config)

    def __call__(
        self, x: Float[Array, "B T H"], keys: Key[Array, " B"] | None
    ) -> Float[Array, "B T H"]:
        """Transforms the hidden states of a batch."""
        change = self.attention(self.attention_norm(x))
        x = x + dropout(change, self.rate, fold_in(keys, 0))
        change = self.feed_forward(self.feed_forward_norm(x))
        return x + dropout(change, self.rate, fold_in(keys, 1))


class Decoder(nnx.Module):
    """Embedding, layers, a last norm, and the head.

    No layer has a bias. Positions have no parameters, so that a sequence may be of any
    length.

    Args:
      config: The model's sizes.
      rngs: Source of the initial parameters.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> from models import DECODER_SIZES, Decoder
      >>> decoder = Decoder(DECODER_SIZES["nano"], rngs=nnx.Rngs(0))
      >>> decoder(jnp.zeros((2, 16), jnp.int32)).shape
      (2, 16, 256)
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.rate = config.dropout
        self.remat: Remat = config.remat
        self.embedding = embed(config, config.vocab_size, rngs)
        layers = [DecoderLayer(config, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(config)
        sizes = config.hidden_size, config.vocab_size
        tied = config.tied
        self.head = None if tied else linear(config, *sizes, rngs, use_bias=False)

    def __call__(
        self, token_ids: Int[Array, "B T"], keys: Key[Array, " B"] | None = None
    ) -> Float[Array, "B T V"]:
        """Scores, at each token, every token as the next one.

        Args:
          token_ids: The tokens.
          keys: A dropout key a sequence; without, the result is deterministic.

        Returns:
          Logits, float32.
        """
        x = dropout(self.embedding(token_ids), self.rate, fold_in(keys, 0))
        run = recomputed(_run, self.remat)
        for i, layer in enumerate(self.layers):
            x = run(*nnx.split(layer), x, fold_in(keys, i + 1))
        head = self.embedding.attend if self.head is None else self.head
        return head(self.norm(x)).astype(jnp.float32)


def _run(
    graph: nnx.GraphDef[DecoderLayer],
    state: Any,
    x: Float[Array, "B T H"],
    keys: Key[Array, " B"] | None,
) -> Float[Array, "B T H"]:
    return nnx.merge(graph, state)(x, keys)


def next_token_loss(
    decoder: Decoder,
    windows: Int[Array, "B T+1"],
    keys: Key[Array, " B"] | None = None,
) -> Float[Array, ""]:
    """The mean cross-entropy of predicting each token from those before it.

    Args:
      decoder: The model.
      windows: Sequences and the token after each: the first T are read, the last T are
        to be predicted.
      keys: A dropout key a sequence; without, the result is deterministic.

    Returns:
      The loss a token, in nats.
    """
    logits = decoder(windows[:, :-1], keys)
    return jnp.mean(cross_entropy(logits, windows[:, 1:]))
