"""The parts that the layers and the heads of transformers are built of."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from models.config import BertConfig, TransformerConfig


def initializer(
    config: TransformerConfig, *, residual: bool = False
) -> nnx.Initializer:
    """BERT's initial weights: a normal distribution cut at two deviations.

    Args:
      config: The model's sizes.
      residual: Whether the weights' product is added to the residual stream.

    Returns:
      The initializer.
    """
    deviation = config.residual_range if residual else config.initializer_range
    return nnx.initializers.truncated_normal(deviation)


def linear(
    config: TransformerConfig,
    size_in: int,
    size_out: int,
    rngs: nnx.Rngs,
    *,
    residual: bool = False,
    use_bias: bool = True,
) -> nnx.Linear:
    """A dense layer initialised as BERT's are; `residual` as in `initializer`."""
    return nnx.Linear(
        size_in,
        size_out,
        use_bias=use_bias,
        kernel_init=initializer(config, residual=residual),
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


def embed(config: TransformerConfig, rows: int, rngs: nnx.Rngs) -> nnx.Embed:
    """An embedding table initialised as BERT's are."""
    return nnx.Embed(
        rows,
        config.hidden_size,
        embedding_init=initializer(config),
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


# Else the backward pass would keep several float32 arrays of the size of x, which may
# be bfloat16; they take nothing to compute again. XLA may keep what is at hand.
@partial(jax.checkpoint, static_argnums=3, prevent_cse=False)
def _normalised(
    x: Float[Array, "... H"],
    scale: Float[Array, " H"],
    bias: Float[Array, " H"],
    epsilon: float,
) -> Float[Array, "... H"]:
    scale, bias = (jnp.broadcast_to(param, x.shape) for param in (scale, bias))
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(variance + epsilon)
    return (normal * scale + bias).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / √(variance + ε) · scale + bias, in float32 whatever x is."""

    def __init__(self, config: BertConfig):
        self.epsilon = config.layer_norm_epsilon
        self.scale = nnx.Param(jnp.ones(config.hidden_size))
        self.bias = nnx.Param(jnp.zeros(config.hidden_size))

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        """Normalises the last axis."""
        return _normalised(x, self.scale[...], self.bias[...], self.epsilon)


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
