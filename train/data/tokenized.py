"""A corpus as flat arrays of tokens, training and held-out text, in files."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from train.core.errors import InputError, writable
from train.core.run_folder import contents_name
from train.data.array_files import growing_array, make_folder, mapped_array
from train.data.corpus import DOCUMENT_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence
    from pathlib import Path

    from jaxtyping import Int
    from numpy.typing import DTypeLike
    from tokenizers import Tokenizer

    from train.data.corpus import Document, Survey
    from train.data.flags import CorpusFlags

HELD_OUT = 0.05
"""Share of the documents that is kept for evaluation."""

MAX_SENTENCE = 64
"""Word pieces of the longest stretch that is handled as a sentence."""

TRAINING, EVALUATION = "training", "held_out"

TOKENS_FOLDER = "tokens"

_ARRAYS = ("pieces", "sentences", "documents")


@dataclass(frozen=True)
class TokenizedCorpus:
    """Documents of sentences of tokens, end to end.

    Attributes:
      pieces: Tokens of all sentences, (P,).
      sentences: Start of each sentence in `pieces`, and the end, (S + 1,).
      documents: Start of each document in `sentences`, and the end, (D + 1,).
    """

    pieces: Int[np.ndarray, " pieces"]
    sentences: Int[np.ndarray, " sentences+1"]
    documents: Int[np.ndarray, " documents+1"]

    @property
    def num_documents(self) -> int:
        """Documents."""
        return len(self.documents) - 1

    def text(self, first: int, last: int) -> Int[np.ndarray, " pieces"]:
        """The tokens of the sentences `first` to `last`, `last` excluded."""
        return self.pieces[self.sentences[first] : self.sentences[last]]


def held_out_documents(corpus: Survey, seed: int) -> frozenset[int]:
    """Chooses documents by their numbers, by a seed, that are kept for evaluation.

    Raises:
      InputError: There are too few documents for two of either kind, the least that
        sentence pairs from different documents take.
    """
    if corpus.documents < 4:
        raise InputError(
            f"the corpus makes {corpus.documents} documents, of about "
            f"{DOCUMENT_CHARACTERS:,} characters each, and training needs at least 4, "
            "two of them held out; give more text, or more files, or break its lines "
            "where they are longer, as a document ends where a line does."
        )
    count = max(2, round(HELD_OUT * corpus.documents))
    chosen = np.random.default_rng(seed).permutation(corpus.documents)[:count]
    return frozenset(chosen.tolist())


def tokens_folder(
    config: CorpusFlags, out: Path, fill: Callable[[Path], None], *deciding: str
) -> Path:
    """The folder of a corpus as tokens, filled where it is not there.

    It is named by all that decides them, and lies in a run's folder `out` where the
    flags name no other.

    Raises:
      InputError: It cannot be written to.
    """
    folder = config.tokens or out / TOKENS_FOLDER
    folder /= contents_name(*deciding)[:16]
    with writable(*((config.tokens, "--tokens") if config.tokens else (out, "--out"))):
        make_folder(folder, fill)
    return folder


def write_tokens(
    folder: Path,
    documents: Iterable[Document],
    held_out: Container[int],
    encode: Callable[[Document], Sequence[Any]],
    unknown: int | None,
    dtype: DTypeLike = np.int32,
) -> float:
    """Cuts documents into tokens, one at a time, for `read_tokens`.

    Args:
      folder: Takes the files.
      documents: All documents.
      held_out: The numbers of those that are not trained on.
      encode: From a document to the tokens of each of its sentences; one that has
        none is left out.
      unknown: The token of what has none of its own; None where all has.
      dtype: The type of a token.

    Returns:
      The share of the tokens that are unknown.
    """
    lost = total = 0
    with (
        _growing_corpus(folder / TRAINING, dtype) as append_training,
        _growing_corpus(folder / EVALUATION, dtype) as append_held_out,
    ):
        for number, document in enumerate(documents):
            if not (sentences := encode(document)):
                continue
            tokens = np.concatenate(sentences)
            lost += np.count_nonzero(tokens == unknown)
            total += len(tokens)
            append = append_held_out if number in held_out else append_training
            append(tokens, [len(sentence) for sentence in sentences])
    return lost / max(1, total)


def sentences_of(tokenizer: Tokenizer) -> Callable[[Document], list[list[int]]]:
    """From a document to the word pieces of its sentences, for `write_tokens`.

    Sentences that have no pieces are left out. Long ones, and text whose sentences end
    in no way that is known, are cut into equal stretches: what a sequence has no room
    for would hardly be trained on.
    """

    def stretches(ids: list[int]) -> Iterator[list[int]]:
        count = -(-len(ids) // MAX_SENTENCE)
        for i in range(count):
            yield ids[len(ids) * i // count : len(ids) * (i + 1) // count]

    def encode(document: Document) -> list[list[int]]:
        encoded = tokenizer.encode_batch(list(document), add_special_tokens=False)
        return [part for each in encoded for part in stretches(each.ids)]

    return encode


def read_tokens(folder: Path) -> tuple[TokenizedCorpus, TokenizedCorpus]:
    """Training and held-out text, of which memory holds the parts that are read."""
    training, held_out = (
        TokenizedCorpus(
            *(mapped_array(folder / name / f"{array}.npy") for array in _ARRAYS)
        )
        for name in (TRAINING, EVALUATION)
    )
    return training, held_out


@contextlib.contextmanager
def _growing_corpus(folder: Path, dtype: DTypeLike) -> Iterator[Callable[..., None]]:
    """The files of a corpus, and a function that appends a document's sentences."""
    folder.mkdir()
    num_pieces = num_sentences = 0
    with contextlib.ExitStack() as stack:
        append_pieces, append_sentences, append_document = (
            stack.enter_context(growing_array(folder / f"{name}.npy", kind))
            for name, kind in zip(_ARRAYS, (dtype, np.int64, np.int64), strict=True)
        )
        append_sentences(0)
        append_document(0)

        def append(tokens: Int[np.ndarray, " tokens"], lengths: list[int]) -> None:
            nonlocal num_pieces, num_sentences
            append_pieces(tokens)
            append_sentences(num_pieces + np.cumsum(lengths))
            num_pieces += len(tokens)
            num_sentences += len(lengths)
            append_document(num_sentences)

        yield append
