"""Sentence pairs and their masks, as BERT's pre-training makes them.

Devlin et al., `BERT <https://arxiv.org/abs/1810.04805>`_, 2018, appendix A.1 and A.2;
whole words as in `create_pretraining_data.py` of google-research/bert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from models import PreTrainingBatch
from train.core.batches import endless
from train.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import grain
    from jaxtyping import Bool, Int

    from train.data.tokenized import TokenizedCorpus
    from train.data.vocabulary import Pieces, Vocabulary

MASKED = 0.15
"""Share of the tokens that are predicted."""

SHORT = 0.1
"""Share of the pairs that are cut to a random length."""

_NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]


def examples(
    corpus: TokenizedCorpus,
    pieces: Pieces,
    length: int,
    seed: int,
    inside: Bool[np.ndarray, " vocabulary"] | None = None,
) -> grain.MapDataset[PreTrainingBatch]:
    """An endless sequence of masked sentence pairs, each epoch shuffled anew.

    Args:
      corpus: The text.
      pieces: The vocabulary's special ids.
      length: Tokens of a sequence.
      seed: Decides order, pairs and masks.
      inside: Which pieces go on with the word before them, to mask whole words.

    Returns:
      A data set whose example i is a function of the seed and i.

    Raises:
      InputError: The text has fewer than two documents, or no sentences to pair.
    """
    spans = pack_spans(corpus, length)
    if corpus.num_documents < 2 or not len(spans):
        raise InputError(
            "fewer than two of the corpus's documents that are trained on, or of those "
            "that are held out, have two word pieces together; give more text."
        )
    ordered = endless(cast("Sequence[np.ndarray]", spans), seed)
    return ordered.random_map(MaskedPairs(corpus, pieces, length, inside))


def num_predictions(length: int) -> int:
    """Places for predictions in a sequence of a length: its share of masked tokens."""
    return max(1, round(MASKED * length))


def continues_word(vocabulary: Vocabulary) -> Bool[np.ndarray, " vocabulary"]:
    """Which pieces of a vocabulary go on with the word before them."""
    return np.array([piece.startswith("##") for piece in vocabulary])


def pack_spans(corpus: TokenizedCorpus, length: int) -> Int[np.ndarray, "spans 3"]:
    """Cuts each document into spans that fill sequences.

    Args:
      corpus: The text.
      length: Tokens of a sequence, special tokens included.

    Returns:
      The document, the first sentence and the one after the last of each span of at
      least two word pieces, in the corpus's order. Every sentence is in one of them,
      but for rests of a single piece, which are left out.
    """
    capacity = length - _NUM_SPECIAL

    def spans() -> Iterator[tuple[int, int, int]]:
        for document in range(corpus.num_documents):
            first, end = corpus.documents[document : document + 2].tolist()
            while first < end:
                full = corpus.sentences[first] + capacity
                last = int(np.searchsorted(corpus.sentences, full))
                last = min(max(last, first + 1), end)
                if corpus.sentences[last] - corpus.sentences[first] >= 2:
                    yield document, first, last
                first = last

    return np.fromiter(spans(), np.dtype((np.int64, 3)))


@dataclass(frozen=True)
class MaskedPairs:
    """Turns a span into a masked sentence pair, at random.

    Attributes:
      corpus: The text that the spans are of.
      pieces: The vocabulary's special ids.
      length: Tokens of a sequence, special tokens included.
      inside: Which word pieces go on with the word before them, to predict whole words;
        None to predict single pieces.
    """

    corpus: TokenizedCorpus
    pieces: Pieces
    length: int
    inside: Bool[np.ndarray, " vocabulary"] | None = None

    def __call__(
        self, span: Int[np.ndarray, " 3"], rng: np.random.Generator
    ) -> PreTrainingBatch:
        """Builds the sequence of a span of `pack_spans`, without a batch's axis.

        Half of the pairs are what the text has.
        """
        document, start, end = span.tolist()
        first, second = self._split(start, end, rng)
        is_random = rng.random() < 0.5
        capacity = self.length - _NUM_SPECIAL
        if rng.random() < SHORT:
            capacity = int(rng.integers(2, capacity, endpoint=True))
        if is_random:
            second = self._elsewhere(document, rng)
        first, second = _truncate(first, second, capacity, rng)
        return self._mask(first, second, is_random, rng)

    def _split(
        self, start: int, end: int, rng: np.random.Generator
    ) -> tuple[Int[np.ndarray, " first"], Int[np.ndarray, " second"]]:
        """Cuts sentences in two between them, a lone sentence in its middle."""
        text = self.corpus.text(start, end)
        if end - start == 1:
            cut = len(text) // 2
        else:
            sentence = int(rng.integers(start + 1, end))
            cut = self.corpus.sentences[sentence] - self.corpus.sentences[start]
        return text[:cut], text[cut:]

    def _elsewhere(
        self, document: int, rng: np.random.Generator
    ) -> Int[np.ndarray, " second"]:
        """Text of another document, from a random sentence on."""
        other = int(rng.integers(self.corpus.num_documents - 1))
        other += other >= document
        start, end = self.corpus.documents[other : other + 2]
        return self.corpus.text(int(rng.integers(start, end)), int(end))

    def _mask(
        self,
        first: Int[np.ndarray, " first"],
        second: Int[np.ndarray, " second"],
        is_random: bool,
        rng: np.random.Generator,
    ) -> PreTrainingBatch:
        pieces = self.pieces
        tokens = np.full(self.length, pieces.pad, np.int32)
        used = len(first) + len(second) + _NUM_SPECIAL
        cls, sep = [pieces.cls], [pieces.sep]
        tokens[:used] = np.concatenate([cls, first, sep, second, sep])
        types = np.zeros(self.length, np.int32)
        types[len(first) + 2 : used] = 1

        ordinary = np.delete(np.arange(1, used - 1), len(first))
        places = num_predictions(self.length)
        count = min(places, num_predictions(used))
        if self.inside is None:
            chosen = np.sort(rng.choice(ordinary, count, replace=False))
        else:
            # What a segment begins with is no part of a word in the other.
            begins = ~self.inside[tokens[ordinary]]
            begins[[0, len(first)]] = True
            chosen = ordinary[choose_words(begins, count, rng)]
            count = len(chosen)
        positions, labels = np.zeros((2, places), np.int32)
        positions[:count] = chosen
        labels[:count] = tokens[chosen]
        tokens[chosen] = self._corrupt(tokens[chosen], rng)
        return PreTrainingBatch(
            token_ids=tokens,
            token_types=types,
            lengths=np.asarray(used, np.int32),
            masked_positions=positions,
            masked_labels=labels,
            masked_weights=(np.arange(places) < count).astype(np.float32),
            next_sentence_labels=np.asarray(is_random, np.int32),
        )

    def _corrupt(
        self, tokens: Int[np.ndarray, " count"], rng: np.random.Generator
    ) -> Int[np.ndarray, " count"]:
        """80 % become [MASK], 10 % any piece, 10 % stay."""
        fate = rng.random(len(tokens))
        is_masked: Bool[np.ndarray, " count"] = fate < 0.8
        is_kept: Bool[np.ndarray, " count"] = fate >= 0.9
        anything = rng.integers(self.pieces.vocab_size, size=len(tokens))
        return np.where(
            is_masked, self.pieces.mask, np.where(is_kept, tokens, anything)
        )


def choose_words(
    begins: Bool[np.ndarray, " pieces"], count: int, rng: np.random.Generator
) -> Int[np.ndarray, " chosen"]:
    """Chooses whole words in a random order, leaving out those that are too many.

    Args:
      begins: Whether a piece begins a word; the first does.
      count: Pieces to choose, at most; none may be chosen where words are longer.
      rng: What decides.

    Returns:
      The places of the chosen words' pieces, in order.

    Example:
      >>> import numpy as np
      >>> from train.bert.masked_pairs import choose_words
      >>> begins = np.array([True, False, False, True, False])
      >>> choose_words(begins, 2, np.random.default_rng(0))
      array([3, 4])
    """
    starts = np.append(np.flatnonzero(begins), len(begins))
    chosen: list[int] = []
    for word in rng.permutation(len(starts) - 1):
        first, end = starts[word : word + 2].tolist()
        if len(chosen) + end - first <= count:
            chosen += range(first, end)
        if len(chosen) == count:
            break
    return np.sort(np.asarray(chosen, np.intp))


def _truncate(
    first: Int[np.ndarray, " first"],
    second: Int[np.ndarray, " second"],
    capacity: int,
    rng: np.random.Generator,
) -> tuple[Int[np.ndarray, " first"], Int[np.ndarray, " second"]]:
    """Takes pieces off the longer segment, at either end, until both fit."""
    fair = capacity // 2
    keep_first = min(len(first), max(capacity - len(second), fair))
    keep_second = min(len(second), capacity - keep_first)
    return _trim(first, keep_first, rng), _trim(second, keep_second, rng)


def _trim(
    segment: Int[np.ndarray, " before"], size: int, rng: np.random.Generator
) -> Int[np.ndarray, " after"]:
    # BERT tosses a coin for the end at which each piece is taken off.
    front = int(rng.binomial(len(segment) - size, 0.5))
    return segment[front : front + size]
