"""The stream of batches: a function of the seed and the step alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import grain
import numpy as np

from train.bert.pairs import MaskedPairs, Pieces, pack_spans
from train.data.vocabulary import CLS, MASK, PAD, SEP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool

    from models import PreTrainingBatch
    from train.bert.pairs import Span, Spans
    from train.data.tokenized import TokenizedCorpus
    from train.data.vocabulary import Vocabulary

Batch = TypeVar("Batch")


def special_pieces(vocabulary: Vocabulary) -> Pieces:
    """The ids of the special tokens of a vocabulary."""
    pad, cls, sep, mask = (vocabulary.index(token) for token in (PAD, CLS, SEP, MASK))
    return Pieces(len(vocabulary), pad=pad, cls=cls, sep=sep, mask=mask)


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
    return (
        grain.MapDataset.source(
            list(pack_spans(corpus, length)) if spans is None else spans
        )
        .seed(seed)
        .shuffle()
        .repeat()
        .random_map(MaskedPairs(corpus, pieces, length, inside))
    )


def element(elements: grain.MapDataset[Batch], index: int) -> Batch:
    """An element of a data set from which nothing was filtered out."""
    found = elements[index]
    assert found is not None, "filtered out"
    return found


@dataclass(frozen=True)
class _Rows(Generic[Batch]):
    """Rows `first` to `last` of every batch, as one sequence of examples."""

    examples: grain.MapDataset[Batch]
    batch: int
    first: int
    last: int

    def __len__(self) -> int:
        return sys.maxsize // self.batch

    def __getitem__(self, index: int) -> Batch:
        step, row = divmod(index, self.last - self.first)
        return element(self.examples, step * self.batch + self.first + row)


def batches(
    examples: grain.MapDataset[Batch],
    batch: int,
    *,
    process: int = 0,
    num_processes: int = 1,
) -> grain.MapDataset[Batch]:
    """One process's part of each global batch.

    Args:
      examples: The endless sequence of examples.
      batch: Sequences in a global batch; a multiple of the processes.
      process: Which part.
      num_processes: How many parts; end to end they are the global batch, however
        many there are.

    Returns:
      A data set whose element t is the part of step t.
    """
    part = batch // num_processes
    rows = _Rows(examples, batch, process * part, (process + 1) * part)
    return grain.MapDataset.source(rows).batch(part)


def stream(batches: grain.MapDataset[Batch]) -> grain.DatasetIterator[Batch]:
    """Iterates over batches and prepares the next few beside the training.

    Args:
      batches: The batches of all steps.

    Returns:
      An iterator; its `get_state()` is what a checkpoint keeps for `set_state()`.
    """
    # One thread: examples are made in Python, which runs one at a time.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(batches.to_iter_dataset(options))
