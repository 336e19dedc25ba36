"""The BERT encoder of Devlin et al., 2018, as published or with pre-LayerNorm.

Shapes: B sequences, T tokens, H hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from models.attention import SelfAttention
from models.dropout import dropout, fold_in
from models.parts import LayerNorm, embed, gelu, linear
from models.remat import recomputed

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Float, Int, Key

    from models.config import BertConfig, Remat


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


class FeedForward(nnx.Module):
    """Dense, gelu, dense."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.up = linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.down = linear(
            config, config.intermediate_size, config.hidden_size, rngs, residual=True
        )

    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """Transforms each token on its own."""
        return self.down(gelu(self.up(x)))


class Layer(nnx.Module):
    """Attention, then feed-forward, each of them f in a residual sublayer.

    Post-LayerNorm: x ← norm(x + dropout(f(x))). Pre-LayerNorm:
    x ← x + dropout(f(norm(x))), which bears large learning rates, and so large batches,
    better: its gradients near the output do not start out large.

    References:
      Xiong et al., `On Layer Normalization in the Transformer Architecture
      <https://arxiv.org/abs/2002.04745>`_, 2020
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.rate = config.dropout
        self.pre_norm = config.pre_norm
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
        attend = partial(self.attention, lengths=lengths)
        x = self._sublayer(x, attend, self.attention_norm, fold_in(keys, 0))
        return self._sublayer(
            x, self.feed_forward, self.feed_forward_norm, fold_in(keys, 1)
        )

    def _sublayer(
        self,
        x: Float[Array, "B T H"],
        f: Callable[[Float[Array, "B T H"]], Float[Array, "B T H"]],
        norm: LayerNorm,
        keys: Key[Array, " B"] | None,
    ) -> Float[Array, "B T H"]:
        if self.pre_norm:
            return x + dropout(f(norm(x)), self.rate, keys)
        return norm(x + dropout(f(x), self.rate, keys))


class Encoder(nnx.Module):
    """The embeddings and the layers, which all heads share.

    With pre-LayerNorm one more LayerNorm follows the last layer, and the embeddings
    keep theirs, as in DeepSpeed's pre-LayerNorm BERT (Megatron-LM's has none there):
    the parameters are those of post-LayerNorm and that one norm.

    Written for both of NNX's modes: no shared references, no state but parameters;
    dropout's keys are given with each call.

    Args:
      config: The model's sizes.
      rngs: Source of the initial parameters.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.rate = config.dropout
        self.max_positions = config.max_positions
        self.remat: Remat = config.remat
        self.batch_axis = config.batch_axis
        self.embeddings = Embeddings(config, rngs=rngs)
        layers = [Layer(config, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = _stacked(layers) if config.scan else nnx.List(layers)
        self.final_norm = LayerNorm(config) if config.pre_norm else None

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
          The last layer's states, with pre-LayerNorm normalised, in the compute dtype.

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
        in_loop = not isinstance(self.layers, nnx.List)
        run = recomputed(_run, self.remat, in_loop=in_loop)
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
        return x if self.final_norm is None else self.final_norm(x)

    def _divided(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        if self.batch_axis is None:
            return x
        return jax.lax.with_sharding_constraint(x, PartitionSpec(self.batch_axis))


class BertOutput(NamedTuple):
    """The encoder's results.

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
