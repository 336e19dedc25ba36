"""Exact match and F1 against the official definitions, worked out by hand."""

import pytest
from squad_files import (
    EXCERPT,
    answerable,
    content,
    question,
    unanswerable,
)

from train.core.errors import InputError
from train.squad.dataset import Answer, Question, parse_squad, read_squad
from train.squad.scores import (
    evaluate,
    exact_match,
    f1,
    normalize,
    question_scores,
)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Bit", "bit"),
        ("a an the", ""),
        ("Athens, another theme", "athens another theme"),
        ("U.S.'s  (10,000)\n", "uss 10000"),
        # Punctuation goes before articles: what it joins is no article.
        ("a-b", "ab"),
        ("the-end", "theend"),
        # A dash that is not ASCII stays, and ends a word.
        ("an\u2013other", "\u2013other"),
        ("“the”", "“ ”"),
        ("", ""),
    ],
)
def test_normal_form(text, normal):
    assert normalize(text) == normal


@pytest.mark.parametrize(
    ("prediction", "reference", "em", "score"),
    [
        ("one bit", "one bit", 1, 1),
        ("The one, bit!", "one bit", 1, 1),
        ("one bit each", "one bit", 0, 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("bit", "one bit", 0, 2 * 1 * (1 / 2) / (1 + 1 / 2)),
        ("bit bit", "bit", 0, 2 / 3),
        ("bit bit one", "bit bit bit", 0, 2 / 3),
        ("bit one", "one bit", 0, 1),
        ("sign", "one bit", 0, 0),
        ("", "one bit", 0, 0),
    ],
)
@pytest.mark.parametrize("has_null", [False, True])
def test_scores_of_an_answer(prediction, reference, em, score, has_null):
    assert exact_match(prediction, reference) == em
    assert f1(prediction, reference, has_null=has_null) == pytest.approx(score)


def test_answers_without_words_agree_in_v2_alone():
    assert exact_match("the", "") == 1
    assert f1("the", "") == 0
    assert f1("the", "", has_null=True) == 1
    assert f1("", "a bit", has_null=True) == 0
    both = Question("q", "?", "", (Answer("the", 0), Answer("bit", 4)))
    assert question_scores(both, "", has_null=False) == (1, 0)
    # A reference without words is none in v2.0 where there is another.
    assert question_scores(both, "", has_null=True) == (0, 0)


def test_the_reference_that_suits_best_counts():
    many = Question(
        "q", "?", "", tuple(Answer(text, 0) for text in ("one bit", "bit", "one sign"))
    )
    assert question_scores(many, "the bit", has_null=False) == (1, 1)
    em, score = question_scores(many, "sign one two", has_null=False)
    # Against "one sign": 2 of 3 words, 2 of 2.
    assert (em, score) == (0, pytest.approx(0.8))


def test_perfect_predictions_score_a_hundred():
    squad = read_squad(EXCERPT)
    for number in (0, -1):
        predictions = {q.id: q.answers[number].text for q in squad.questions}
        assert evaluate(squad, predictions) == {"all": (100, 100, len(squad.questions))}


def test_questions_without_a_prediction_are_wrong_in_v1():
    squad = parse_squad(content(question("a", "one bit"), question("b", "scale")))
    assert evaluate(squad, {"a": "one", "x": "?"})["all"] == (
        0, pytest.approx(100 * (2 / 3) / 2), 2
    )  # fmt: skip
    with pytest.raises(InputError, match="for none of the questions"):
        evaluate(squad, {"x": "one bit"})


def v2():
    return parse_squad(
        content(
            answerable("a", "one bit", "bit"),
            answerable("b", "The scale"),
            unanswerable("c"),
            unanswerable("d"),
        )
    )


def test_v2_scores_answerable_and_unanswerable_apart():
    predictions = {"a": "one bit sent", "b": "", "c": "", "d": "scale"}
    scores = evaluate(v2(), predictions)
    assert scores["answerable"] == (0, pytest.approx(100 * 0.8 / 2), 2)
    assert scores["unanswerable"] == (50, 50, 2)
    assert scores["all"] == (25, pytest.approx(100 * 1.8 / 4), 4)
    del predictions["d"]  # left out, as in the official script
    assert evaluate(v2(), predictions)["all"].total == 3
