"""The BERT encoder of Devlin et al., 2018: post-LayerNorm, as published.

Shapes: B sequences, T tokens, H hidden size, N heads, D = H / N.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from models.dropout import dropout, fold_in

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Key

    from models.config import BertConfig


def initializer(config: BertConfig) -> nnx.Initializer:
    """BERT's initial weights: a normal distribution cut at two deviations."""
    return nnx.initializers.truncated_normal(config.initializer_range)


def linear(
    config: BertConfig, size_in: int, size_out: int, rngs: nnx.Rngs
) -> nnx.Linear:
    """A dense layer initialised as BERT's are."""
    return nnx.Linear(
        size_in,
        size_out,
        kernel_init=initializer(config),
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


def embed(config: BertConfig, rows: int, rngs: nnx.Rngs) -> nnx.Embed:
    """An embedding table initialised as BERT's are."""
    return nnx.Embed(
        rows,
        config.hidden_size,
        embedding_init=initializer(config),
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


class LayerNorm(nnx.Module):
    """(x - mean) / √(variance + ε) · scale + bias, in float32 whatever x is."""

    def __init__(self, config: BertConfig):
        self.epsilon = config.layer_norm_epsilon
        self.scale = nnx.Param(jnp.ones(config.hidden_size))
        self.bias = nnx.Param(jnp.zeros(config.hidden_size))

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        """Normalises the last axis."""
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon)
        scale, bias = (
            jnp.broadcast_to(param[...], x.shape) for param in (self.scale, self.bias)
        )
        return (normal * scale + bias).astype(x.dtype)


@jax.custom_jvp
def gelu(x: Float[Array, " *shape"]) -> Float[Array, " *shape"]:
    """Returns x Φ(x) with the exact normal distribution function, as in BERT.

    The derivative Φ(x) + x φ(x) is spelt out because jax 0.12.0 cannot differentiate
    `erf` inside `shard_map` (its own rule mixes varying and constant values).
    """
    return x * _normal_cdf(x)


@gelu.defjvp
def _gelu_jvp(
    primals: tuple[Float[Array, " *shape"]], tangents: tuple[Float[Array, " *shape"]]
) -> tuple[Float[Array, " *shape"], Float[Array, " *shape"]]:
    (x,), (dx,) = primals, tangents
    density = jnp.exp(-0.5 * jnp.square(x)) * (1 / math.sqrt(2 * math.pi))
    cdf = _normal_cdf(x)
    return x * cdf, (cdf + x * density) * dx


def _normal_cdf(x: Float[Array, " *shape"]) -> Float[Array, " *shape"]:
    return 0.5 * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


class Embeddings(nnx.Module):
    """LayerNorm(word + position + token type)."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.word = embed(config, config.vocab_size, rngs)
        self.position = embed(config, config.max_positions, rngs)
        self.token_type = embed(config, config.num_token_types, rngs)
        self.norm = LayerNorm(config)

    def __call__(
        self, token_ids: Int[Array, "B T"], token_types: Int[Array, "B T"]
    ) -> Float[Array, "B T H"]:
        """Embeds word pieces at their positions."""
        positions = jnp.arange(token_ids.shape[1])
        return self.norm(
            self.word(token_ids)
            + self.position(positions)[None]
            + self.token_type(token_types)
        )


class SelfAttention(nnx.Module):
    """Multi-head self-attention with one product for queries, keys and values.

    The probabilities are not dropped out, unlike the original's: the fused attention
    kernels know no dropout of theirs, and the output is dropped out anyway.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        self.qkv = linear(config, config.hidden_size, 3 * config.hidden_size, rngs)
        self.out = linear(config, config.hidden_size, config.hidden_size, rngs)

    def __call__(
        self, x: Float[Array, "B T H"], lengths: Int[Array, " B"]
    ) -> Float[Array, "B T H"]:
        """Mixes each sequence's first `lengths` tokens."""
        batch, length, hidden = x.shape
        qkv = self.qkv(x).reshape(  # (B, T, 3, N, D)
            batch, length, 3, self.num_heads, hidden // self.num_heads
        )
        q, k, v = (qkv[:, :, i] for i in range(3))
        # Lengths rather than a mask: the form that cuDNN's flash attention takes.
        # Strict promotion would bar jax.nn's own mixing of bfloat16 and float32.
        with jax.numpy_dtype_promotion("standard"):
            attended = jax.nn.dot_product_attention(
                q, k, v, key_value_seq_lengths=lengths
            )
        return self.out(attended.reshape(batch, length, hidden))


class FeedForward(nnx.Module):
    """Dense, gelu, dense."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.up = linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.down = linear(config, config.intermediate_size, config.hidden_size, rngs)

    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """Transforms each token on its own."""
        return self.down(gelu(self.up(x)))


class Layer(nnx.Module):
    """Post-LayerNorm: x ← norm(x + dropout(f(x))), f attention, then feed-forward."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.rate = config.dropout
        self.attention = SelfAttention(config, rngs=rngs)
        self.attention_norm = LayerNorm(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_norm = LayerNorm(config)

    def __call__(
        self,
        x: Float[Array, "B T H"],
        lengths: Int[Array, " B"],
        keys: Key[Array, " B"] | None,
    ) -> Float[Array, "B T H"]:
        """Transforms the hidden states of a batch."""
        drop = partial(dropout, rate=self.rate)
        y = drop(self.attention(x, lengths), keys=fold_in(keys, 0))
        x = self.attention_norm(x + y)
        y = drop(self.feed_forward(x), keys=fold_in(keys, 1))
        return self.feed_forward_norm(x + y)


class Encoder(nnx.Module):
    """Embeddings and layers: what every head stands on.

    Written for both of NNX's modes: no shared references, no state but parameters;
    dropout's keys are given with each call.

    Args:
      config: The model's sizes.
      rngs: Source of the initial parameters.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.rate = config.dropout
        self.max_positions = config.max_positions
        self.remat = config.remat
        self.batch_axis = config.batch_axis
        self.embeddings = Embeddings(config, rngs=rngs)
        layers = [Layer(config, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = _stacked(layers) if config.scan else nnx.List(layers)

    def encode(
        self,
        token_ids: Int[Array, "B T"],
        token_types: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        keys: Key[Array, " B"] | None = None,
    ) -> Float[Array, "B T H"]:
        """Computes the hidden states of a batch.

        Args:
          token_ids: Word pieces.
          token_types: 0 for the first segment, 1 for the second.
          lengths: Tokens before the padding; what follows is not attended to.
          keys: A dropout key a sequence; without, the result is deterministic.

        Returns:
          The last layer's states, in the compute dtype.

        Raises:
          ValueError: The sequences are longer than the position embedding.
        """
        length = token_ids.shape[1]
        if length > self.max_positions:
            raise ValueError(
                f"sequences of {length} tokens do not fit the {self.max_positions} "
                "positions of this model; shorten them or raise max_positions."
            )
        x = self.embeddings(token_ids, token_types)
        x = self._divided(dropout(x, self.rate, fold_in(keys, 0)))
        run = jax.checkpoint(_run, static_argnums=0) if self.remat else _run
        if isinstance(self.layers, nnx.List):
            for i, layer in enumerate(self.layers):
                x = run(*nnx.split(layer), x, lengths, fold_in(keys, i + 1))
                x = self._divided(x)
        else:
            graph, stack = nnx.split(self.layers)
            count = jax.tree.leaves(stack)[0].shape[0]

            def body(
                x: Float[Array, "B T H"], layer: tuple[Any, Int[Array, ""]]
            ) -> tuple[Float[Array, "B T H"], None]:
                state, i = layer
                x = run(graph, state, x, lengths, fold_in(keys, i + 1))
                return self._divided(x), None

            x, _ = jax.lax.scan(body, x, (stack, jnp.arange(count)))
        return x

    def _divided(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        if self.batch_axis is None:
            return x
        return jax.lax.with_sharding_constraint(x, PartitionSpec(self.batch_axis))


class BertOutput(NamedTuple):
    """What the encoder computes.

    Attributes:
      hidden: The last layer's states, (B, T, H).
      pooled: The first token's state through the pooler, (B, H).
    """

    hidden: Float[Array, "B T H"]
    pooled: Float[Array, "B H"]


class Bert(Encoder):
    """Embeddings, encoder and pooler.

    Args:
      config: The model's sizes.
      rngs: Source of the initial parameters.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> from models import SIZES, Bert
      >>> bert = Bert(SIZES["tiny"], rngs=nnx.Rngs(0))
      >>> tokens = jnp.zeros((2, 16), jnp.int32)
      >>> bert(tokens, tokens, jnp.array([16, 9])).pooled.shape
      (2, 128)

    References:
      Devlin et al., `BERT: Pre-training of Deep Bidirectional Transformers for Language
      Understanding <https://arxiv.org/abs/1810.04805>`_, 2018
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.pooler = linear(config, config.hidden_size, config.hidden_size, rngs)

    def __call__(
        self,
        token_ids: Int[Array, "B T"],
        token_types: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        keys: Key[Array, " B"] | None = None,
    ) -> BertOutput:
        """Encodes a batch; arguments and errors are those of `encode`.

        Returns:
          The hidden states and the pooled state, in the compute dtype.
        """
        hidden = self.encode(token_ids, token_types, lengths, keys)
        return BertOutput(hidden, jnp.tanh(self.pooler(hidden[:, 0])))


def _run(
    graph: nnx.GraphDef[Layer],
    state: Any,
    x: Float[Array, "B T H"],
    lengths: Int[Array, " B"],
    keys: Key[Array, " B"] | None,
) -> Float[Array, "B T H"]:
    return nnx.merge(graph, state)(x, lengths, keys)


def _stacked(layers: list[Layer]) -> Layer:
    """One layer whose parameters are those of all, along a leading axis."""
    states = [nnx.state(layer) for layer in layers]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    return nnx.merge(nnx.graphdef(layers[0]), stack)
