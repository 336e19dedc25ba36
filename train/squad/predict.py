"""Answers from logits: the best spans over a question's windows, or none."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from train.core.errors import writable
from train.core.output import is_main_process, say
from train.core.text_file import replace_text
from train.squad.windows import by_question, has_most_context

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jaxtyping import Bool, Float

    from train.squad.dataset import Question, Squad
    from train.squad.windows import Window

MAX_ANSWER = 30
"""Word pieces of the longest answer."""


class Span(NamedTuple):
    """An answer: start plus end logit, its first character and past its last."""

    score: float
    start: int
    end: int


class Prediction(NamedTuple):
    """A model's answer to a question.

    Attributes:
      question: The question.
      best: Its likeliest answer; None where the text has no word pieces.
      null: The score of there being no answer: the least over the windows.
    """

    question: Question
    best: Span | None
    null: float

    @property
    def null_odds(self) -> float:
        """The score of no answer less that of the best; +∞ where there is none."""
        return self.null - self.best.score if self.best else math.inf

    def text(self, threshold: float = math.inf) -> str:
        """The answer, or nothing where `null_odds` are above a threshold."""
        if not self.best or self.null_odds > threshold:
            return ""
        _, start, end = self.best
        return self.question.context[start:end]


def predict(
    questions: Sequence[Question],
    windows: Sequence[Window],
    starts: Float[np.ndarray, "W T"],
    ends: Float[np.ndarray, "W T"],
    *,
    max_answer: int = MAX_ANSWER,
) -> list[Prediction]:
    """Finds the best answers to questions.

    A span counts in the window in which its first word piece has most text about it,
    with the sum of its logits, as in Devlin et al., 2018.

    Args:
      questions: The questions.
      windows: Their windows, in order.
      starts: Start logits of the windows' sequences.
      ends: End logits.
      max_answer: Word pieces of the longest answer.

    Returns:
      A prediction a question.
    """
    logits = zip(*(np.asarray(x, np.float64) for x in (starts, ends)), strict=True)
    predictions = []
    for same in by_question(windows):
        question = questions[same[0].question]
        best: Span | None = None
        null = math.inf
        for window, judged in zip(same, has_most_context(same), strict=True):
            start, end = next(logits)
            null = min(null, float(start[0] + end[0]))
            span = _best_span(window, judged, start, end, max_answer)
            if span and (best is None or span.score > best.score):
                best = span
        predictions.append(Prediction(question, best, null))
    return predictions


def _best_span(
    window: Window,
    judged: Bool[np.ndarray, " pieces"],
    starts: Float[np.ndarray, " T"],
    ends: Float[np.ndarray, " T"],
    max_answer: int,
) -> Span | None:
    """The best span that begins with a piece judged here; None where there is none."""
    if not judged.any():
        return None
    inside = slice(window.text_place, window.text_place + len(judged))
    ends = np.concatenate([ends[inside], np.full(max_answer - 1, -np.inf)])
    scores = np.where(judged, starts[inside], -np.inf)[:, None] + (
        np.lib.stride_tricks.sliding_window_view(ends, max_answer)
    )  # of a span by its first piece and its length
    first, more = divmod(int(np.argmax(scores)), max_answer)
    start = window.text_place + first
    return Span(float(scores[first, more]), *window.characters(start, start + more))


def answers(
    squad: Squad, predictions: Sequence[Prediction], threshold: float
) -> dict[str, str]:
    """The answers by their questions' ids, as `predictions.json` has them.

    In v2.0 there is none where the null odds are above the threshold.
    """
    limit = threshold if squad.has_null else math.inf
    return {p.question.id: p.text(limit) for p in predictions}


def write_answers(
    folder: Path,
    squad: Squad,
    predictions: Sequence[Prediction],
    threshold: float,
    suffix: str = "",
) -> None:
    """Writes answers for the official scripts, on one process of many, and says where.

    `predictions.json`, and in v2.0 `null_odds.json`, each with a suffix before `.json`;
    the threshold is that of `answers`.

    Raises:
      InputError: The folder cannot be written to.
    """
    if not is_main_process():
        return
    contents: dict[str, dict[str, Any]] = {
        "predictions": answers(squad, predictions, threshold)
    }
    if squad.has_null:
        # JSON has no infinity.
        contents["null_odds"] = {
            p.question.id: min(p.null_odds, 1e9) for p in predictions
        }
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Of another file, answered before.
        (folder / f"null_odds{suffix}.json").unlink(missing_ok=True)
        for name, content in contents.items():
            text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
            replace_text(folder / f"{name}{suffix}.json", text + "\n")
    file = folder / f"predictions{suffix}.json"
    say(f"{file}: the answers to {len(predictions):,} questions")
