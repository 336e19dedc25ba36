"""Questions as sequences: windows over their texts, and spans there and back.

A sequence is [CLS] question [SEP] window [SEP]. Windows overlap where a text is longer
than one, as in Devlin et al., 2018.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.processors import BertProcessing

from models import SpanBatch
from train.core.errors import InputError
from train.data.vocabulary import CLS, SEP

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jaxtyping import Bool, Int

    from train.data.vocabulary import Pieces
    from train.squad.dataset import Question, Squad

STRIDE = 128
"""Word pieces between the starts of two windows over a text."""

MAX_QUESTION = 64
"""Word pieces of a question; what follows is cut off."""

NOWHERE = (0, 0)
"""The places of an answer that is not in a window: those of [CLS]."""

_NUM_SPECIAL = 3  # [CLS] question [SEP] window [SEP]


class Window(NamedTuple):
    """A question beside a stretch of its text.

    Attributes:
      question: Number of the question.
      tokens: Ids of the sequence without padding, (T,).
      text_place: Place in the sequence of the text's first word piece here.
      first: Number of that piece in the whole text.
      spans: Characters of each piece here, first and past the last, (P, 2).
      answer: Places of the answer's first and last piece; `NOWHERE` if it is not
        whole here.
    """

    question: int
    tokens: Int[np.ndarray, " T"]
    text_place: int
    first: int
    spans: Int[np.ndarray, "P 2"]
    answer: tuple[int, int]

    def characters(self, start: int, end: int) -> tuple[int, int]:
        """The text's characters, first and past the last, from one place to another."""
        first, last = start - self.text_place, end - self.text_place
        return int(self.spans[first, 0]), int(self.spans[last, 1])


@dataclass(frozen=True)
class Questions:
    """Questions to be learnt from or to be answered.

    Attributes:
      squad: The questions.
      windows: Their windows.
      pieces: The vocabulary's special ids.
    """

    squad: Squad
    windows: Sequence[Window]
    pieces: Pieces


def windows(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    length: int,
    *,
    stride: int = STRIDE,
) -> list[Window]:
    """Cuts questions' texts into windows.

    Args:
      questions: The questions; the first answer of each is the one to be learnt.
      tokenizer: Cuts text into word pieces, without special tokens.
      length: Tokens of a sequence, special tokens included.
      stride: Word pieces between the starts of two windows; at most half a window's,
        so that an answer across the end of one is whole in the next.

    Returns:
      Windows in the questions' order, at least one each; together they hold every
      word piece of a text.

    Raises:
      InputError: A sequence has no room for text beside a question.
    """
    texts = list(dict.fromkeys(question.context for question in questions))
    contexts = {
        text: (encoding, _with_marks(text, encoding.offsets))
        for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True)
    }
    ids = tokenizer.get_vocab()
    joining = Tokenizer(tokenizer.model)
    joining.post_processor = BertProcessing((SEP, ids[SEP]), (CLS, ids[CLS]))
    cut = []
    for number, question in enumerate(questions):
        asked = tokenizer.encode(question.text)
        if len(asked) > MAX_QUESTION:
            # `Encoding.truncate` keeps what it cuts off for windows of their own.
            end = asked.offsets[MAX_QUESTION][0]
            asked = tokenizer.encode(question.text[:end])
        capacity = length - _NUM_SPECIAL - len(asked)
        if capacity < 1:
            raise InputError(
                f"a sequence of {length} tokens has no room for text beside a question "
                f"of {len(asked)} word pieces; give a longer --seq, 384 for SQuAD."
            )
        context, spans = contexts[question.context]
        step = max(1, min(stride, capacity // 2))
        # To tokenizers a stride is what two windows share.
        joining.enable_truncation(
            max_length=length, stride=capacity - step, strategy="only_second"
        )
        joined = joining.post_process(asked, context)
        place = len(asked) + 2
        for index, encoding in enumerate([joined, *joined.overflowing]):
            first = step * index
            answer = _answer(spans, first, first + capacity, question, place)
            tokens = np.asarray(encoding.ids, np.int32)
            text = spans[first : first + capacity]
            cut.append(Window(number, tokens, place, first, text, answer))
    return cut


def _with_marks(
    text: str, offsets: Sequence[tuple[int, int]]
) -> Int[np.ndarray, "P 2"]:
    """Characters of pieces in a text, with the combining marks that follow them.

    The tokenizer drops a letter's accents where they are characters of their own.
    """
    spans = np.asarray(offsets, np.int32).reshape(-1, 2)
    limits = [*spans[1:, 0].tolist(), len(text)]
    for piece, limit in zip(spans, limits, strict=False):
        end = int(piece[1])
        while end < limit and unicodedata.category(text[end]) == "Mn":
            end += 1
        piece[1] = end
    return spans


def _answer(
    spans: Int[np.ndarray, "P 2"], first: int, last: int, question: Question, place: int
) -> tuple[int, int]:
    """Places of the fewest word pieces that hold a question's first answer.

    `NOWHERE` if there is no answer, none that has word pieces, or not all of them are
    in the window, which has the pieces from `first` up to `last`; `place` is that of
    the first of them in the sequence.
    """
    if not question.answers:
        return NOWHERE
    text, start = question.answers[0]
    pieces = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < start + len(text)))
    if not len(pieces) or pieces[0] < first or pieces[-1] >= last:
        return NOWHERE
    return int(pieces[0]) - first + place, int(pieces[-1]) - first + place


def sequence(window: Window, pieces: Pieces, length: int) -> SpanBatch:
    """A window's sequence, padded to a length, without the axis of a batch."""
    used = len(window.tokens)
    tokens = np.full(length, pieces.pad, np.int32)
    tokens[:used] = window.tokens
    types = np.zeros(length, np.int32)
    types[window.text_place : used] = 1
    used, start, end = (np.asarray(x, np.int32) for x in (used, *window.answer))
    return SpanBatch(tokens, types, used, start, end)


def by_question(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """The windows of each question, in order."""
    for _, same in groupby(windows, key=lambda window: window.question):
        yield list(same)


def has_most_context(windows: Sequence[Window]) -> list[Bool[np.ndarray, " pieces"]]:
    """The pieces of each window of a question that have most text about them there.

    The text about a piece is the lesser of what is before and after it, and a
    hundredth of the window's length more, as in BERT's published code; an earlier
    window wins a tie.
    """
    ends = [window.first + len(window.spans) for window in windows]
    scores = np.full((len(windows), ends[-1]), -np.inf)
    for row, window, end in zip(scores, windows, ends, strict=True):
        place = np.arange(end - window.first)
        row[window.first : end] = np.minimum(place, place[::-1]) + 0.01 * len(place)
    best = np.argmax(scores, axis=0)
    return [
        best[window.first : end] == number
        for number, (window, end) in enumerate(zip(windows, ends, strict=True))
    ]
