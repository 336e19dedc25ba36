"""SQuAD files, v1.1 and v2.0: questions about paragraphs, answered by spans of them.

Rajpurkar et al., `SQuAD <https://arxiv.org/abs/1606.05250>`_, 2016, and `Know What You
Don't Know <https://arxiv.org/abs/1806.03822>`_, 2018.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from train.core.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


class Answer(NamedTuple):
    """A span of a context: its text, and the character that it starts at."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a text.

    Attributes:
      id: The name that predictions are filed under.
      text: The question.
      context: The text that it is about.
      answers: Spans that people marked; none where there is no answer.
    """

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Squad:
    """The questions of a file.

    Attributes:
      questions: In the file's order.
      has_null: True if questions may have no answer, as in v2.0.
    """

    questions: tuple[Question, ...]
    has_null: bool


def read_squad(path: Path, *, with_answers: bool = True) -> Squad:
    """Reads a SQuAD file, without its answers if they need not be there.

    Raises:
      InputError: It cannot be read, is no SQuAD file of v1.1 or v2.0, or has an answer
        that is not in the text where the file says.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); give the path of a SQuAD file."
        ) from error
    except ValueError as error:
        raise InputError(
            f"{path} is not JSON of texts ({error}); give a SQuAD file, v1.1 or v2.0."
        ) from error
    try:
        return parse_squad(content, with_answers=with_answers)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def parse_squad(content: Any, *, with_answers: bool = True) -> Squad:
    """Makes questions of the contents of a SQuAD file; as `read_squad`.

    Example:
      >>> from train.squad.dataset import parse_squad
      >>> answer = {"text": "one bit", "answer_start": 6}
      >>> qa = {"id": "a", "question": "What?", "answers": [answer]}
      >>> paragraph = {"context": "Signs: one bit.", "qas": [qa]}
      >>> parse_squad({"data": [{"paragraphs": [paragraph]}]})
      Traceback (most recent call last):
        ...
      train.core.errors.InputError: question 'a': its answer 'one bit' is said to \
start at character 6, where the text has ' one bi'; correct answer_start.
    """
    questions: dict[str, Question] = {}
    has_null, place = False, "the file"
    try:
        for i, article in enumerate(content["data"], start=1):
            place = f"article {i}"
            for paragraph in article["paragraphs"]:
                context = _text(paragraph["context"])
                for qa in paragraph["qas"]:
                    place = f"article {i}, a question after {[*questions][-1:]}"
                    name, text = _text(qa["id"]), _text(qa["question"])
                    place = f"question {name!r}"
                    answers = _answers(context, qa, place) if with_answers else ()
                    if name in questions:
                        raise InputError(
                            f"two questions have the id {name!r}; predictions are "
                            "filed under it, so rename either."
                        )
                    questions[name] = Question(name, text, context, answers)
                    has_null |= "is_impossible" in qa
    except (KeyError, TypeError) as error:
        raise InputError(
            f"not a SQuAD file of v1.1 or v2.0: {type(error).__name__} in {place}: "
            f"{error}; compare it with one."
        ) from error
    if not questions:
        raise InputError("there are no questions; give a SQuAD file that has some.")
    # Without answers the version alone tells.
    has_null |= not with_answers and content.get("version") == "v2.0"
    return Squad(tuple(questions.values()), has_null)


def _answers(context: str, qa: dict[str, Any], place: str) -> tuple[Answer, ...]:
    entries = qa.get("answers", [])
    is_impossible = bool(qa.get("is_impossible"))
    if is_impossible == bool(entries):
        said = "is marked impossible and has" if entries else "has no"
        raise InputError(
            f"{place} {said} answers; one that cannot be answered has "
            '"is_impossible": true and no answers, as in v2.0, and questions whose '
            "answers are not known are for --predict."
        )
    answers = []
    for entry in entries:
        text, start = _text(entry["text"]), entry["answer_start"]
        if not text.strip():
            raise InputError(f"{place} has an empty answer; remove it.")
        there = context[start : start + len(text)] if start >= 0 else ""
        if there != text:
            raise InputError(
                f"{place}: its answer {text!r} is said to start at character {start}, "
                f"where the text has {there!r}; correct answer_start."
            )
        answers.append(Answer(text, start))
    return tuple(answers)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
