"""Questions as sequences: windows over their texts, and spans there and back.

A sequence is [CLS] question [SEP] window [SEP]. Windows overlap where a text is longer
than one, as in Devlin et al., 2018.
"""

from __future__ import annotations

import unicodedata
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from models import SpanBatch
from train.core.command import say
from train.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jaxtyping import Bool, Int
    from tokenizers import Tokenizer

    from train.data.pieces import Pieces
    from train.squad.dataset import Question

STRIDE = 128
"""Word pieces between the starts of two windows over a text."""

MAX_QUESTION = 64
"""Word pieces of a question; what follows is cut off."""

NOWHERE = (0, 0)
"""The places of what is not in a window: those of [CLS]."""

_NUM_SPECIAL = 3  # [CLS] question [SEP] window [SEP]


class Context(NamedTuple):
    """A text in word pieces.

    Attributes:
      pieces: Their ids, (P,).
      spans: The characters that each is made of, first and past the last, (P, 2).
    """

    pieces: Int[np.ndarray, " P"]
    spans: Int[np.ndarray, "P 2"]


class Window(NamedTuple):
    """A question beside a part of its text.

    Attributes:
      question: The question's number.
      asked: Its word pieces, (Q,).
      context: The whole text.
      first: The window's first piece of it.
      last: The piece after its last.
      answer: First and last piece of the answer in the whole text, if there is one.
    """

    question: int
    asked: Int[np.ndarray, " Q"]
    context: Context
    first: int
    last: int
    answer: tuple[int, int] | None

    @property
    def start(self) -> int:
        """The place of the window's first piece in the sequence."""
        return len(self.asked) + 2

    @property
    def places(self) -> tuple[int, int]:
        """The places of the answer's first and last piece; `NOWHERE` if not here."""
        if self.answer is None:
            return NOWHERE
        first, last = self.answer
        if first < self.first or last >= self.last:
            return NOWHERE
        shift = self.start - self.first
        return first + shift, last + shift

    def characters(self, start: int, end: int) -> tuple[int, int]:
        """The characters between two places of the sequence, inclusive.

        Args:
          start: The place of the first piece.
          end: The place of the last.

        Returns:
          The first character in the text, and the one after the last.
        """
        shift = self.first - self.start
        spans = self.context.spans
        return int(spans[start + shift, 0]), int(spans[end + shift, 1])


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
      tokenizer: Cuts text into word pieces.
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
        text: Context(
            np.asarray(encoding.ids, np.int32),
            _with_marks(text, encoding.offsets),
        )
        for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True)
    }
    asked = tokenizer.encode_batch([question.text for question in questions])
    cut = []
    for number, (question, encoding) in enumerate(zip(questions, asked, strict=True)):
        pieces = np.asarray(encoding.ids[:MAX_QUESTION], np.int32)
        capacity = length - _NUM_SPECIAL - len(pieces)
        if capacity < 1:
            raise InputError(
                f"a sequence of {length} tokens has no room for text beside a question "
                f"of {len(pieces)} word pieces; give longer ones, 384 for SQuAD."
            )
        context = contexts[question.context]
        answer = answer_pieces(context, question)
        for first, last in _cuts(len(context.pieces), capacity, stride):
            cut.append(Window(number, pieces, context, first, last, answer))
    return cut


def unknown_share(windows: Sequence[Window], unk: int) -> float:
    """The share of the texts' word pieces that are [UNK], by window.

    Args:
      windows: The windows.
      unk: The id of [UNK].

    Returns:
      The share; 0 of no pieces.
    """
    parts = [w.context.pieces[w.first : w.last] for w in windows]
    unknown = sum(np.count_nonzero(part == unk) for part in parts)
    return unknown / max(1, sum(map(len, parts)))


def _with_marks(
    text: str, offsets: Sequence[tuple[int, int]]
) -> Int[np.ndarray, "P 2"]:
    """Where pieces are in a text, with the combining marks that follow them.

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


def answer_pieces(context: Context, question: Question) -> tuple[int, int] | None:
    """The fewest word pieces that hold a question's first answer.

    Args:
      context: The question's text.
      question: The question.

    Returns:
      The first and the last piece; None if there is no answer, or none that has word
      pieces.
    """
    if not question.answers:
        return None
    answer = question.answers[0]
    before = context.spans[:, 1] <= answer.start
    after = context.spans[:, 0] >= answer.start + len(answer.text)
    inside = np.flatnonzero(~before & ~after)
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def check_answers(questions: Sequence[Question], windows: Sequence[Window]) -> None:
    """Tells of answers that cannot be learnt.

    Args:
      questions: The questions.
      windows: Their windows.

    Raises:
      InputError: None can be.
    """
    answered = sum(bool(question.answers) for question in questions)
    lost = answered - len({w.question for w in windows if w.places != NOWHERE})
    advice = "they are longer than half a window, or invisible; give a longer --seq"
    if answered and lost == answered:
        raise InputError(f"no answer is whole in a window: {advice}.")
    if lost:
        say(
            f"{lost:,} of {answered:,} answers are whole in no window, and are learnt "
            f"as none: {advice}."
        )


def sequence(window: Window, pieces: Pieces, length: int) -> SpanBatch:
    """The sequence of a window.

    Args:
      window: The window.
      pieces: The vocabulary's special ids.
      length: Tokens of the sequence, the padding included.

    Returns:
      A batch of one sequence, without the batch's axis.
    """
    tokens = np.full(length, pieces.pad, np.int32)
    text = window.context.pieces[window.first : window.last]
    sep = [pieces.sep]
    used = window.start + len(text) + 1
    tokens[:used] = np.concatenate([[pieces.cls], window.asked, sep, text, sep])
    types = np.zeros(length, np.int32)
    types[window.start : used] = 1
    start, end = window.places
    return SpanBatch(
        token_ids=tokens,
        token_types=types,
        lengths=np.asarray(used, np.int32),
        starts=np.asarray(start, np.int32),
        ends=np.asarray(end, np.int32),
    )


def by_question(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """The windows of each question, in order."""
    for _, group in groupby(windows, key=lambda window: window.question):
        yield list(group)


def has_most_context(windows: Sequence[Window]) -> list[Bool[np.ndarray, " pieces"]]:
    """Where each piece of a text has most text about it: in one of its windows.

    The text about a piece is the lesser of what is before and after it, and a
    hundredth of the window's length more, as in BERT's published code; an earlier
    window wins a tie.

    Args:
      windows: The windows of one question.

    Returns:
      For each window, which of its pieces are judged by it.
    """
    scores = np.full((len(windows), len(windows[0].context.pieces)), -np.inf)
    for row, (*_, first, last, _) in zip(scores, windows, strict=True):
        place = np.arange(last - first)
        row[first:last] = np.minimum(place, place[::-1]) + 0.01 * (last - first)
    best = np.argmax(scores, axis=0)
    return [
        best[window.first : window.last] == number
        for number, window in enumerate(windows)
    ]


def _cuts(size: int, capacity: int, stride: int) -> Iterator[tuple[int, int]]:
    first, step = 0, max(1, min(stride, capacity // 2))
    while size - first > capacity:
        yield first, first + capacity
        first += step
    yield first, size
