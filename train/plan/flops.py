"""The arithmetic of BERT's pre-training: its matrix products, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.bert.masked_pairs import num_predictions

if TYPE_CHECKING:
    from models import BertConfig


def step_flops(config: BertConfig, length: int, *, remat: bool = False) -> int:
    r"""FLOP of a training step on one sequence, forward and backward.

    .. math:: 3 \cdot 2 \left( L \left( T (4 h^2 + 2 h f) + 2 T^2 h \right) + h^2 + 2 h
      + P (h^2 + h V) \right)

    of L layers of width h and feed-forward width f, T tokens, P of them predicted, and
    a vocabulary of V: a multiplication and an addition for each weight and token
    (queries, keys, values and their output, 4 h²; feed-forward, 2 h f), and for each
    pair of tokens in attention; the pooler, the next-sentence head and the masked
    language model's. The backward pass computes two products for each.

    Args:
      config: The sizes.
      length: T, of which `num_predictions` are predicted.
      remat: Whether the backward pass computes the layers' forward pass once more.

    Returns:
      Their number.

    Example:
      >>> from train.plan.flops import step_flops
      >>> from models import SIZES
      >>> f"{step_flops(SIZES['large'], 128):.3g}"
      '2.4e+11'
    """
    h, f = config.hidden_size, config.intermediate_size
    layer = length * (4 * h * h + 2 * h * f) + 2 * length * length * h
    layers = 2 * config.num_layers * layer
    predictions = num_predictions(length)
    heads = 2 * (h * h + 2 * h + predictions * (h * h + h * config.vocab_size))
    return (4 if remat else 3) * layers + 3 * heads
