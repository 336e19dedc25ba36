"""A batch for BERT's pre-training: full sequences of random tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from models import PreTrainingBatch
from train.bert.masked_pairs import num_predictions

if TYPE_CHECKING:
    from models import BertConfig


def random_batch(
    model: BertConfig, rows: int, length: int, seed: int = 0
) -> PreTrainingBatch:
    """Sequences whose tokens, of which 15 % are predicted, are random."""
    rng = np.random.default_rng(seed)
    predictions = rows, num_predictions(length)

    def integers(below: int, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(below, size=shape, dtype=np.int32)

    return PreTrainingBatch(
        token_ids=integers(model.vocab_size, (rows, length)),
        token_types=integers(2, (rows, length)),
        lengths=np.full(rows, length, np.int32),
        masked_positions=integers(length, predictions),
        masked_labels=integers(model.vocab_size, predictions),
        masked_weights=np.ones(predictions, np.float32),
        next_sentence_labels=integers(2, (rows,)),
    )
