"""The stream of examples: a function of the seed and the index alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from train.bert.masked_pairs import MaskedPairs, pack_spans
from train.core.batches import endless

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grain
    from jaxtyping import Bool

    from models import PreTrainingBatch
    from train.bert.masked_pairs import Span, Spans
    from train.data.pieces import Pieces
    from train.data.tokenized import TokenizedCorpus
    from train.data.vocabulary import Vocabulary


def continues_word(vocabulary: Vocabulary) -> Bool[np.ndarray, " vocabulary"]:
    """Which pieces of a vocabulary go on with the word before them."""
    return np.array([piece.startswith("##") for piece in vocabulary])


def examples(
    corpus: TokenizedCorpus,
    pieces: Pieces,
    length: int,
    seed: int,
    inside: Bool[np.ndarray, " vocabulary"] | None = None,
    spans: Sequence[Span] | Spans | None = None,
) -> grain.MapDataset[PreTrainingBatch]:
    """An endless sequence of masked sentence pairs, each epoch shuffled anew.

    Args:
      corpus: The text.
      pieces: The vocabulary's special ids.
      length: Tokens of a sequence.
      seed: Decides order, pairs and masks.
      inside: Which pieces go on with the word before them, to mask whole words.
      spans: The corpus's, from `read_spans`; None to pack them into memory.

    Returns:
      A data set whose example i is a function of the seed and i.
    """
    packed = list(pack_spans(corpus, length)) if spans is None else spans
    pairs = MaskedPairs(corpus, pieces, length, inside)
    return endless(packed, seed).random_map(pairs)
