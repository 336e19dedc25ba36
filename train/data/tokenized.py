"""A corpus as flat arrays of word-piece ids, training and held-out text, in files."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from train.core.errors import InputError
from train.data.corpus import DOCUMENT_CHARACTERS
from train.data.stored import Growing, mapped
from train.data.vocabulary import UNK

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence
    from pathlib import Path

    from jaxtyping import Int
    from tokenizers import Tokenizer

    from train.data.corpus import Document, Survey

HELD_OUT = 0.05
"""Share of the documents that is kept for evaluation."""

MAX_SENTENCE = 64
"""Word pieces of the longest stretch that is handled as a sentence."""

TRAINING, EVALUATION = "training", "held_out"

_ARRAYS = {"pieces": np.int32, "sentences": np.int64, "documents": np.int64}


@dataclass(frozen=True)
class TokenizedCorpus:
    """Documents of sentences of word pieces, end to end.

    Attributes:
      pieces: Word-piece ids of all sentences, (P,).
      sentences: Where each sentence starts in `pieces`, and the end, (S + 1,).
      documents: Where each document starts in `sentences`, and the end, (D + 1,).
    """

    pieces: Int[np.ndarray, " pieces"]
    sentences: Int[np.ndarray, " sentences+1"]
    documents: Int[np.ndarray, " documents+1"]

    @property
    def num_documents(self) -> int:
        """Documents."""
        return len(self.documents) - 1

    def text(self, first: int, last: int) -> Int[np.ndarray, " pieces"]:
        """The word pieces of the sentences `first` to `last`, `last` excluded."""
        return self.pieces[self.sentences[first] : self.sentences[last]]


def held_out_documents(corpus: Survey, seed: int) -> frozenset[int]:
    """Chooses documents that are kept for evaluation.

    Args:
      corpus: What is known of all documents.
      seed: Decides which.

    Returns:
      Their numbers.

    Raises:
      InputError: There are too few documents for two of either kind, the least that
        sentence pairs from different documents take.
    """
    if corpus.documents < 4:
        advice = "give more text, or more files"
        if corpus.longest > 2 * DOCUMENT_CHARACTERS:
            advice = (
                f"a document ends where a line does, and one has {corpus.longest:,} "
                "characters: break its lines, or give more files"
            )
        raise InputError(
            f"the corpus makes {corpus.documents} documents and training takes 4 at "
            f"least, two of them held out; {advice}."
        )
    count = max(2, round(HELD_OUT * corpus.documents))
    chosen = np.random.default_rng(seed).permutation(corpus.documents)[:count]
    return frozenset(chosen.tolist())


def write_tokens(
    folder: Path,
    documents: Iterable[Document],
    held_out: Container[int],
    tokenizer: Tokenizer,
) -> float:
    """Cuts documents into word pieces, one at a time, for `read_tokens`.

    Sentences and documents that have no pieces are left out. Long sentences, and text
    whose sentences end in no way that is known, are cut into equal stretches: what a
    sequence has no room for would hardly be trained on.

    Args:
      folder: Where to write.
      documents: All documents.
      held_out: The numbers of those that are not trained on.
      tokenizer: What cuts them.

    Returns:
      The share of the pieces that are [UNK].
    """
    unknown = total = 0
    unk = tokenizer.get_vocab()[UNK]
    with contextlib.ExitStack() as stack:
        training, evaluation = (
            stack.enter_context(_Writer(folder / name))
            for name in (TRAINING, EVALUATION)
        )
        for number, document in enumerate(documents):
            encoded = tokenizer.encode_batch(list(document), add_special_tokens=False)
            ids = [part for e in encoded for part in _stretches(e.ids)]
            total += sum(map(len, ids))
            unknown += sum(part.count(unk) for part in ids)
            if ids:
                (evaluation if number in held_out else training).append(ids)
    return unknown / max(1, total)


def _stretches(ids: list[int]) -> Iterator[list[int]]:
    count = -(-len(ids) // MAX_SENTENCE)
    for i in range(count):
        yield ids[len(ids) * i // count : len(ids) * (i + 1) // count]


def read_tokens(folder: Path) -> tuple[TokenizedCorpus, TokenizedCorpus]:
    """Training and held-out text, of which memory holds what is looked at."""
    training, held_out = (
        TokenizedCorpus(*(mapped(folder / name / f"{array}.npy") for array in _ARRAYS))
        for name in (TRAINING, EVALUATION)
    )
    return training, held_out


class _Writer(contextlib.ExitStack):
    """The files of a corpus that grows by documents."""

    def __init__(self, folder: Path):
        super().__init__()
        folder.mkdir()
        self._pieces, self._sentences, self._documents = (
            self.enter_context(Growing(folder / f"{name}.npy", dtype))
            for name, dtype in _ARRAYS.items()
        )
        self._ends = (0, 0)  # of the last sentence, of the last document
        self._sentences.append(np.zeros(1, np.int64))
        self._documents.append(np.zeros(1, np.int64))

    def append(self, sentences: Sequence[Sequence[int]]) -> None:
        """Adds a document."""
        piece, sentence = self._ends
        ends = piece + np.cumsum([len(ids) for ids in sentences])
        sentence += len(sentences)
        self._pieces.append(np.concatenate(sentences))
        self._sentences.append(ends)
        self._documents.append(np.array([sentence]))
        self._ends = (int(ends[-1]), sentence)
