"""Questions as sequences: windows over their texts, and spans there and back.

A sequence is [CLS] question [SEP] window [SEP]. Windows overlap where a text is longer
than one, as in Devlin et al., 2018.
"""

from __future__ import annotations

import unicodedata
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.processors import BertProcessing

from models import SpanBatch
from train.core.errors import InputError
from train.core.output import say
from train.data.vocabulary import CLS, SEP

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jaxtyping import Bool, Int
    from tokenizers import Encoding

    from train.data.pieces import Pieces
    from train.squad.dataset import Question

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
        """Characters between two places of the sequence, inclusive.

        Args:
          start: Place of the first piece.
          end: Place of the last.

        Returns:
          The first character in the text, and the one after the last.
        """
        first, last = start - self.text_place, end - self.text_place
        return int(self.spans[first, 0]), int(self.spans[last, 1])


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
    joining = _joining(tokenizer)
    cut = []
    for number, question in enumerate(questions):
        asked = _asked(question, tokenizer)
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


def _joining(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that makes sequences of pairs of encodings."""
    joining = Tokenizer(tokenizer.model)
    ids = tokenizer.get_vocab()
    joining.post_processor = BertProcessing((SEP, ids[SEP]), (CLS, ids[CLS]))
    return joining


def _asked(question: Question, tokenizer: Tokenizer) -> Encoding:
    """Word pieces of a question, at most `MAX_QUESTION`."""
    encoding = tokenizer.encode(question.text)
    if len(encoding) > MAX_QUESTION:
        # `Encoding.truncate` keeps what it cuts off for windows of their own.
        end = encoding.offsets[MAX_QUESTION][0]
        encoding = tokenizer.encode(question.text[:end])
    return encoding


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

    Args:
      spans: Characters of the pieces of the whole text.
      first: The window's first piece.
      last: The piece after its last.
      question: The question.
      place: Place of the window's first piece in the sequence.

    Returns:
      The places; `NOWHERE` if there is no answer, none that has word pieces, or not
      all of them are in the window.
    """
    if not question.answers:
        return NOWHERE
    text, start = question.answers[0]
    pieces = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < start + len(text)))
    if not len(pieces) or pieces[0] < first or pieces[-1] >= last:
        return NOWHERE
    return int(pieces[0]) - first + place, int(pieces[-1]) - first + place


def unknown_share(windows: Sequence[Window], unk: int) -> float:
    """The share of the texts' word pieces that are [UNK], by window.

    Args:
      windows: The windows.
      unk: The id of [UNK].

    Returns:
      The share; 0 of no pieces.
    """
    unknown = total = 0
    for window in windows:
        text = window.tokens[window.text_place : -1]
        unknown += np.count_nonzero(text == unk)
        total += len(text)
    return unknown / max(1, total)


def check_answers(questions: Sequence[Question], windows: Sequence[Window]) -> None:
    """Warns of answers that cannot be learnt.

    Args:
      questions: The questions.
      windows: Their windows.

    Raises:
      InputError: None can be.
    """
    answered = sum(bool(question.answers) for question in questions)
    lost = answered - len({w.question for w in windows if w.answer != NOWHERE})
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
    """The pieces that have most text about them in one window of all.

    The text about a piece is the lesser of what is before and after it, and a
    hundredth of the window's length more, as in BERT's published code; an earlier
    window wins a tie.

    Args:
      windows: The windows of one question.

    Returns:
      For each window, True for those of its pieces that are judged by it.
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
