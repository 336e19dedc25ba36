"""SQuAD's exact match and F1, by the definitions of its official scripts.

evaluate-v1.1.py and evaluate-v2.0.py, https://rajpurkar.github.io/SQuAD-explorer/.
They differ in what is empty once normalised: in v2.0 two empty answers agree, in v1.1
they have nothing in common.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from train.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from train.squad.dataset import Question, Squad

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Score(NamedTuple):
    """Exact match and F1 of the answers to several questions.

    Attributes:
      exact: Per cent of them answered exactly.
      f1: Mean F1 of the words of answers, per cent.
      total: Questions.
    """

    exact: float
    f1: float
    total: int


def normalize(text: str) -> str:
    """Lower-cases, and removes punctuation, articles and superfluous blanks.

    Example:
      >>> from train.squad.scores import normalize
      >>> normalize("The  bit, (a sign)!")
      'bit sign'
    """
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, reference: str) -> float:
    """1 if two answers are the same once normalised, else 0."""
    return float(normalize(prediction) == normalize(reference))


def f1(prediction: str, reference: str, *, has_null: bool = False) -> float:
    """2 p r / (p + r) of the precision p and recall r of an answer's words.

    With `has_null` answers without words agree with each other, as in v2.0.

    Example:
      >>> from train.squad.scores import f1
      >>> f1("one bit", "one single bit") == 2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3)
      True
    """
    given, right = normalize(prediction).split(), normalize(reference).split()
    if has_null and not (given and right):
        return float(given == right)
    common = (Counter(given) & Counter(right)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(given), common / len(right)
    return 2 * precision * recall / (precision + recall)


def question_scores(
    question: Question, prediction: str, *, has_null: bool
) -> tuple[float, float]:
    """Exact match and F1 of an answer, each with the reference that suits it best."""
    references = [answer.text for answer in question.answers]
    if has_null:
        references = [text for text in references if normalize(text)] or [""]
    return (
        max(exact_match(prediction, text) for text in references),
        max(f1(prediction, text, has_null=has_null) for text in references),
    )


def evaluate(squad: Squad, predictions: Mapping[str, str]) -> dict[str, Score]:
    """Scores predictions.

    Args:
      squad: The questions.
      predictions: Answers by the question's id. As in the official scripts, a question
        that has none counts as wrong in v1.1 and is left out in v2.0.

    Returns:
      The score of `all` questions, and in v2.0 of the `answerable` and the
      `unanswerable` ones where there are any.

    Raises:
      InputError: There is no prediction for any question.
    """
    known = [q for q in squad.questions if q.id in predictions]
    if not known:
        raise InputError(
            "the predictions are for none of the questions; give those for this file."
        )
    scores = {
        q.id: question_scores(q, predictions[q.id], has_null=squad.has_null)
        for q in known
    }

    def mean(questions: Sequence[Question]) -> Score:
        each = [scores.get(q.id, (0.0, 0.0)) for q in questions]
        exact, f1 = (100 * sum(x) / len(each) for x in zip(*each, strict=True))
        return Score(exact, f1, len(each))

    if not squad.has_null:
        return {"all": mean(squad.questions)}
    parts = {
        "all": known,
        "answerable": [q for q in known if q.answers],
        "unanswerable": [q for q in known if not q.answers],
    }
    return {name: mean(part) for name, part in parts.items() if part}
