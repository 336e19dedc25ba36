"""Self-attention, by XLA or by cuDNN.

Shapes: B sequences, T tokens, H hidden size, N heads, D = H / N.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
from flax import nnx

from models.parts import linear

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from models.config import Attention, BertConfig


class SelfAttention(nnx.Module):
    """Multi-head self-attention with one product for queries, keys and values.

    `BertConfig.attention` chooses who computes softmax(q kᵀ / √D) v:

    `xla`: products and a softmax, on every platform and in every dtype; it holds the
    N · T² probabilities of each sequence, and gives the same bits on every run.

    `cudnn`: flash attention on NVIDIA's GPUs (Ampere or later), which holds none of
    them. Its backward pass adds up with atomics in any order, so that two runs differ
    in the last bits, unless XLA is told otherwise, for the whole step:
    `jax.jit(step, compiler_options={"xla_gpu_exclude_nondeterministic_ops": True})` or
    the same in `XLA_FLAGS`. On GPUs the embeddings' gradients need that too, whatever
    the attention.

    The probabilities are not dropped out, unlike the original's: `jax.nn`'s attention
    knows no dropout, and the output is dropped out anyway.

    References:
      Dao et al., `FlashAttention: Fast and Memory-Efficient Exact Attention with
      IO-Awareness <https://arxiv.org/abs/2205.14135>`_, 2022

      https://openxla.org/xla/determinism and https://github.com/openxla/xla/pull/14125
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        self.implementation: Attention = config.attention
        self.recompute = config.remat == "attention"
        self.qkv = linear(config, config.hidden_size, 3 * config.hidden_size, rngs)
        self.out = linear(
            config, config.hidden_size, config.hidden_size, rngs, residual=True
        )

    def __call__(
        self, x: Float[Array, "B T H"], lengths: Int[Array, " B"]
    ) -> Float[Array, "B T H"]:
        """Mixes each sequence's first `lengths` tokens.

        Args:
          x: Hidden states.
          lengths: Tokens that are attended to.

        Returns:
          An array like `x`.

        Raises:
          ValueError: cuDNN is asked for and not there.
        """
        batch, length, hidden = x.shape
        qkv = self.qkv(x).reshape(  # (B, T, 3, N, D)
            batch, length, 3, self.num_heads, hidden // self.num_heads
        )
        mix = partial(attend, implementation=self.implementation)
        if self.recompute:
            mix = jax.checkpoint(mix)
        q, k, v = (qkv[:, :, i] for i in range(3))
        attended = mix(q, k, v, lengths)
        return self.out(attended.reshape(batch, length, hidden))


def attend(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T N D"],
    v: Float[Array, "B T N D"],
    lengths: Int[Array, " B"] | None = None,
    *,
    is_causal: bool = False,
    implementation: Attention,
) -> Float[Array, "B T N D"]:
    """softmax(q kᵀ / √D) v, by XLA or by cuDNN.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      lengths: Tokens of each sequence that are attended to; None for all.
      is_causal: True to attend to a token itself and those before it alone.
      implementation: Who computes it; `SelfAttention` compares them.

    Returns:
      An array like `q`.

    Raises:
      ValueError: cuDNN is asked for and not there.
      NotImplementedError: cuDNN has no code for these shapes or this dtype.
    """
    # Lengths rather than a mask: cuDNN would take a mask for a bias of N · T² numbers.
    # Strict promotion would bar jax.nn's own mixing of bfloat16 and float32.
    with jax.numpy_dtype_promotion("standard"):
        try:
            return jax.nn.dot_product_attention(
                q,
                k,
                v,
                is_causal=is_causal,
                key_value_seq_lengths=lengths,
                implementation=implementation,
            )
        except NotImplementedError:
            # It is a RuntimeError, of another reason than a cuDNN that is not there.
            raise
        except RuntimeError as error:
            if implementation != "cudnn":
                raise
            raise ValueError(
                f'attention="cudnn" needs an NVIDIA GPU and cuDNN ({error}); install '
                'jax[cuda13] on a machine with one, or choose attention="xla".'
            ) from error
