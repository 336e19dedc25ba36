"""The configuration of a transformer; that of a BERT, and the published sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

Attention = Literal["xla", "cudnn"]
"""Implementations of attention; `models.attention.SelfAttention` compares them."""

Size = Literal["tiny", "mini", "small", "medium", "base", "large"]
"""The names of `SIZES`."""

Remat = Literal["none", "attention", "dots", "layer"]
"""Activations that the backward pass recomputes, from none to all."""


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a transformer, and how it is computed.

    Attributes:
      vocab_size: Rows of the embedding of tokens.
      hidden_size: Width of the residual stream.
      num_layers: Layers.
      num_heads: Attention heads; they divide `hidden_size`.
      intermediate_size: Width of the feed-forward layer.
      initializer_range: Standard deviation of the initial weights.
      dropout: Share of the activations dropped while training.
      dtype: Name of the dtype that is computed in; parameters are float32.
      remat: What the backward pass recomputes instead of keeping it. `none`: nothing.
        `attention`: scores and probabilities, of which there are B · heads · T² for
        two products more. `dots`: all but the products with weights. `layer`: all but
        each layer's input.
      attention: `xla` runs everywhere; `cudnn`, cuDNN's flash attention, on NVIDIA's
        GPUs, in bfloat16 or float16; `models.attention.SelfAttention` says more.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    initializer_range: float = 0.02
    dropout: float = 0.1
    dtype: str = "float32"
    remat: Remat = "none"
    attention: Attention = "xla"

    def __post_init__(self) -> None:
        """Refuses what cannot be built."""
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"{self.num_heads} heads do not divide a hidden size of "
                f"{self.hidden_size}; choose a divisor."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout}.")
        for field, known in (("remat", Remat), ("attention", Attention)):
            if (value := getattr(self, field)) not in get_args(known):
                names = ", ".join(get_args(known))
                raise ValueError(f"{field} is one of {names}, not {value!r}.")
        if self.attention == "cudnn":
            self._check_cudnn()

    @property
    def residual_range(self) -> float:
        """Standard deviation of initial weights whose product joins the residuals.

        The residual stream is never normalised, so that it is divided by
        √(2 · layers), the root of the number of such sums, as in Megatron-LM and
        DeepSpeed.
        """
        return self.initializer_range / math.sqrt(2 * self.num_layers)

    def _check_cudnn(self) -> None:
        otherwise = 'or attention="xla"'
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(
                f"cuDNN's attention computes in bfloat16 or float16, not {self.dtype}; "
                f'choose dtype="bfloat16" {otherwise}.'
            )
        size = self.hidden_size // self.num_heads
        if size % 8 or size > 256:
            raise ValueError(
                f"cuDNN's attention knows heads whose size is a multiple of 8 up to "
                f"256, not {size}; choose another num_heads {otherwise}."
            )
        if self.remat == "attention":
            raise ValueError(
                "cuDNN's attention keeps no scores that could be recomputed; choose "
                f'remat="none" {otherwise}.'
            )


@dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """The shape of a BERT encoder.

    Attributes:
      max_positions: Rows of the position embedding, the longest sequence.
      num_token_types: Rows of the token-type embedding.
      layer_norm_epsilon: Added to the variance in every LayerNorm.
      scan: Whether the layers are one loop over stacked parameters, which compiles in
        the time of one layer; `models.stack_layers` converts.
      pre_norm: Whether a LayerNorm is before each sublayer instead of after it;
        `models.bert.Layer` and `models.Encoder` say where.
      batch_axis: Mesh axis inside a worker that divides the batch, where parameters are
        sharded over it too: activations stay divided by sequences, so that the
        compiler gathers a layer's weights instead; None leaves it to the compiler.
    """

    max_positions: int = 512
    num_token_types: int = 2
    layer_norm_epsilon: float = 1e-12
    scan: bool = False
    pre_norm: bool = False
    batch_axis: str | None = None

    @property
    def residual_range(self) -> float:
        """As of every transformer; undivided where post-LayerNorm normalises."""
        return super().residual_range if self.pre_norm else self.initializer_range


def _size(num_layers: int, hidden_size: int, num_heads: int) -> BertConfig:
    return replace(
        BertConfig(),
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=4 * hidden_size,
    )


SIZES = MappingProxyType(
    {
        "tiny": _size(2, 128, 2),
        "mini": _size(4, 256, 4),
        "small": _size(4, 512, 8),
        "medium": _size(8, 512, 8),
        "base": _size(12, 768, 12),
        "large": _size(24, 1024, 16),
    }
)
"""The published sizes by name.

Tiny to Medium are those of Turc et al., `Well-Read Students Learn Better
<https://arxiv.org/abs/1908.08962>`_, 2019; Base and Large those of Devlin et al.,
`BERT <https://arxiv.org/abs/1810.04805>`_, 2018.
"""
