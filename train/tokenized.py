"""A corpus as flat arrays of word-piece ids, split into training and held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from train.corpus import DOCUMENT_CHARACTERS
from train.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int
    from tokenizers import Tokenizer

    from train.corpus import Document

HELD_OUT = 0.05
"""Share of the documents that is kept for evaluation."""


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


def split_held_out(
    documents: Sequence[Document], seed: int
) -> tuple[list[Document], list[Document]]:
    """Keeps some documents for evaluation.

    Args:
      documents: All documents.
      seed: Decides which.

    Returns:
      Training and held-out documents, each in the order given.

    Raises:
      InputError: There are too few documents for two of either kind, the least that
        sentence pairs from different documents take.
    """
    if len(documents) < 4:
        longest = max(sum(map(len, document)) for document in documents)
        advice = "give more text, or more files"
        if longest > 2 * DOCUMENT_CHARACTERS:
            advice = (
                f"a document ends where a line does, and one has {longest:,} "
                "characters: break its lines, or give more files"
            )
        raise InputError(
            f"the corpus makes {len(documents)} documents and training takes 4 at "
            f"least, two of them held out; {advice}."
        )
    count = max(2, round(HELD_OUT * len(documents)))
    chosen = np.random.default_rng(seed).permutation(len(documents))[:count]
    held_out = set(chosen.tolist())
    return (
        [d for i, d in enumerate(documents) if i not in held_out],
        [d for i, d in enumerate(documents) if i in held_out],
    )


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer) -> TokenizedCorpus:
    """Cuts documents into word pieces.

    Args:
      documents: The documents.
      tokenizer: What cuts them.

    Returns:
      The corpus without the sentences and documents that have no pieces.
    """
    pieces: list[np.ndarray] = []
    starts = [0]
    for document in documents:
        encoded = tokenizer.encode_batch(list(document), add_special_tokens=False)
        ids = [np.asarray(e.ids, np.int32) for e in encoded if e.ids]
        if ids:
            pieces += ids
            starts.append(starts[-1] + len(ids))
    lengths = [len(sentence) for sentence in pieces]
    return TokenizedCorpus(
        pieces=np.concatenate(pieces),
        sentences=np.cumsum([0, *lengths]),
        documents=np.asarray(starts),
    )
