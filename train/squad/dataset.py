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
    from collections.abc import Iterator
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
    """Reads a SQuAD file.

    Args:
      path: A JSON file of v1.1 or v2.0.
      with_answers: False to leave out the answers, which need not be there.

    Returns:
      Its questions.

    Raises:
      InputError: It cannot be read, is no SQuAD file, or has an answer that is not in
        the text where the file says.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); give the path of a SQuAD file."
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is not JSON ({error}); give a SQuAD file, v1.1 or v2.0."
        ) from error
    try:
        squad = parse_squad(content, with_answers=with_answers)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if not squad.questions:
        raise InputError(f"{path} has no questions; give a SQuAD file that has.")
    return squad


def parse_squad(content: Any, *, with_answers: bool = True) -> Squad:
    """Makes questions of the contents of a SQuAD file.

    Args:
      content: The file, parsed as JSON.
      with_answers: As of `read_squad`.

    Returns:
      The questions.

    Raises:
      InputError: It is no SQuAD file, or has an answer that is not in the text where
        the file says.

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
    questions = []
    # Without answers the version alone tells.
    has_null = not with_answers and _version(content) == "v2.0"
    seen = set()
    for context, qa, where in _qas(content):
        question = _question(context, qa, where, with_answers=with_answers)
        if question.id in seen:
            raise InputError(
                f"two questions have the id {question.id!r}; predictions are filed "
                "under it, so rename either."
            )
        seen.add(question.id)
        questions.append(question)
        has_null |= "is_impossible" in qa
    return Squad(tuple(questions), has_null)


def _version(content: Any) -> Any:
    return content.get("version") if isinstance(content, dict) else None


def _qas(content: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Every question with its context, and where it is."""
    for i, article in enumerate(_value(content, "data", list, "the file")):
        where = f"article {i + 1}"
        for j, paragraph in enumerate(_value(article, "paragraphs", list, where)):
            place = f"{where}, paragraph {j + 1}"
            context = _value(paragraph, "context", str, place)
            for k, qa in enumerate(_value(paragraph, "qas", list, place)):
                yield context, qa, f"{place}, question {k + 1}"


def _question(
    context: str, qa: dict[str, Any], where: str, *, with_answers: bool
) -> Question:
    name = _value(qa, "id", str, where)
    text = _value(qa, "question", str, where)
    answers = _answers(name, context, qa, where) if with_answers else ()
    return Question(name, text, context, answers)


def _answers(
    name: str, context: str, qa: dict[str, Any], where: str
) -> tuple[Answer, ...]:
    if "answers" not in qa:
        raise InputError(
            f"not a SQuAD file: {where} has no 'answers' that is a list; give them, or "
            "the file as --predict, where they are not known."
        )
    entries = _value(qa, "answers", list, where)
    is_impossible = qa.get("is_impossible", False)
    if not isinstance(is_impossible, bool):
        raise InputError(f"question {name!r}: is_impossible must be true or false.")
    if is_impossible == bool(entries):
        said = "is marked impossible and has" if entries else "has no"
        raise InputError(
            f"question {name!r} {said} answers; one that cannot be answered has "
            '"is_impossible": true and no answers, as in v2.0, and questions whose '
            "answers are not known are for --predict."
        )
    answers = []
    for entry in entries:
        answer = Answer(
            _value(entry, "text", str, where), _value(entry, "answer_start", int, where)
        )
        if not answer.text.strip():
            raise InputError(f"question {name!r} has an empty answer; remove it.")
        end = answer.start + len(answer.text)
        there = context[answer.start : end] if answer.start >= 0 else ""
        if there != answer.text:
            raise InputError(
                f"question {name!r}: its answer {answer.text!r} is said to start at "
                f"character {answer.start}, where the text has {there!r}; correct "
                "answer_start."
            )
        answers.append(answer)
    return tuple(answers)


def _value(content: Any, key: str, kind: type, where: str) -> Any:
    value = content.get(key) if isinstance(content, dict) else None
    # To Python, true is a number.
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {list: "a list", str: "a text", int: "a whole number"}
        raise InputError(
            f"not a SQuAD file: {where} has no {key!r} that is {names[kind]}; give a "
            "file of v1.1 or v2.0."
        )
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{key!r} of {where} has half of a surrogate pair at character "
                f"{error.start}, which is no text; remove it."
            ) from error
    return value
