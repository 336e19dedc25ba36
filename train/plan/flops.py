"""The arithmetic of BERT's pre-training: its matrix products, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.bert.masked_pairs import num_predictions

if TYPE_CHECKING:
    from models import BertConfig

OF_FORWARD = {"forward": 1, "backward": 2, "step": 3}
"""Cost of each pass in forward passes; the backward pass computes two products for
each."""


def forward_flops(config: BertConfig, length: int, predictions: int) -> int:
    r"""FLOP of the forward pass of one sequence.

    .. math:: 2 \left( L \left( T (4 h^2 + 2 h f) + 2 T^2 h \right) + h^2 + 2 h
      + P (h^2 + h V) \right)

    of L layers of width h and feed-forward width f, T tokens, P of them predicted, and
    a vocabulary of V: a multiplication and an addition for each weight and token
    (queries, keys, values and their output, 4 h²; feed-forward, 2 h f), and for each
    pair of tokens in attention; the pooler, the next-sentence head and the masked
    language model's.

    Args:
      config: The sizes.
      length: T.
      predictions: P.

    Returns:
      Their number.

    Example:
      >>> from train.plan.flops import forward_flops
      >>> from models import SIZES
      >>> f"{forward_flops(SIZES['large'], 128, 19):.3g}"
      '8.01e+10'
    """
    h = config.hidden_size
    heads = h * h + 2 * h + predictions * (h * h + h * config.vocab_size)
    return _layers_flops(config, length) + 2 * heads


def step_flops(config: BertConfig, length: int, *, remat: bool = False) -> int:
    """FLOP of a training step on one sequence, forward and backward.

    Args:
      config: The sizes.
      length: Tokens, of which `num_predictions` are predicted.
      remat: Whether the backward pass computes the layers' forward pass once more.

    Returns:
      Their number.
    """
    forward = forward_flops(config, length, num_predictions(length))
    again = _layers_flops(config, length) if remat else 0
    return OF_FORWARD["step"] * forward + again


def _layers_flops(config: BertConfig, length: int) -> int:
    h, f = config.hidden_size, config.intermediate_size
    layer = length * (4 * h * h + 2 * h * f) + 2 * length * length * h
    return 2 * config.num_layers * layer
