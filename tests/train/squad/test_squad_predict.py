"""The best spans over windows, null answers, and the files that hold them."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from squad_files import answerable, content, question, unanswerable

from train.data.vocabulary import SPECIAL, tokenizer_of
from train.squad.dataset import Question, Squad, parse_squad
from train.squad.predict import Span, answers, predict, write_answers
from train.squad.windows import by_question, has_most_context, windows

WORDS = (*SPECIAL, "one", "bit", "##s", "two", "sign", ".")
LENGTH = 12


def case(seed, texts, stride):
    """Questions, their windows, and random logits."""
    questions = [
        Question(str(number), "one two", text, ()) for number, text in enumerate(texts)
    ]
    cut = windows(questions, tokenizer_of(WORDS), LENGTH, stride=stride)
    logits = np.random.default_rng(seed).normal(size=(2, len(cut), LENGTH))
    return questions, cut, *logits.astype(np.float32)


def brute_force(questions, cut, starts, ends, max_answer):
    """The best score of each text of each question, by trying all spans."""
    found = [{} for _ in questions]
    row = 0
    for same in by_question(cut):
        for window, judged in zip(same, has_most_context(same), strict=True):
            size = len(judged)
            for i in range(size):
                for j in range(i, min(i + max_answer, size)):
                    if not judged[i]:
                        continue
                    places = window.text_place + i, window.text_place + j
                    score = float(starts[row, places[0]]) + float(ends[row, places[1]])
                    first, last = window.characters(*places)
                    text = questions[window.question].context[first:last]
                    texts = found[window.question]
                    texts[text] = max(score, texts.get(text, -math.inf))
            row += 1
    return found


TEXT = st.lists(st.sampled_from(["one", "bits", "sign.", "two"]), max_size=12)


@given(
    st.integers(0, 99),
    st.lists(TEXT.map(" ".join), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_answers_are_the_best_of_all_spans(seed, texts, stride, max_answer):
    questions, cut, starts, ends = case(seed, texts, stride)
    given = predict(questions, cut, starts, ends, max_answer=max_answer)
    expected = brute_force(questions, cut, starts, ends, max_answer)
    for prediction, best in zip(given, expected, strict=True):
        assert prediction.text() == (max(best, key=best.__getitem__) if best else "")
        if prediction.best:
            assert prediction.best.score == pytest.approx(max(best.values()))


def test_the_null_score_is_the_least_of_the_windows():
    questions, cut, starts, ends = case(3, ["one bits two " * 4, "sign"], 3)
    first, second = predict(questions, cut, starts, ends)
    sums = starts[:, 0].astype(float) + ends[:, 0]
    assert len(sums) > 2
    assert first.null == pytest.approx(sums[:-1].min())
    assert second.null == pytest.approx(sums[-1])
    assert first.null_odds == pytest.approx(first.null - first.best.score)
    assert first.text(first.null_odds) == first.text() != ""
    assert first.text(first.null_odds - 1e-6) == ""


def test_a_text_without_pieces_has_no_answer():
    questions, cut, starts, ends = case(0, [" "], 3)
    (prediction,) = predict(questions, cut, starts, ends)
    assert prediction.best is None
    assert prediction.text() == ""
    assert prediction.null_odds == math.inf


def test_right_logits_give_right_answers_in_the_original_letters():
    text = "Two BITS.  One  Sign, two"
    (asked,) = [Question("q", "one", text, ())]
    (window,) = windows([asked], tokenizer_of(WORDS), 16)
    starts, ends = np.zeros((2, 1, 16), np.float32)
    starts[0, window.text_place + 1] = 5  # "bit" of "BITS"
    ends[0, window.text_place + 5] = 5  # "Sign"
    starts[0, 1] = ends[0, 2] = 9  # the question is no place for answers
    (prediction,) = predict([asked], [window], starts, ends)
    assert prediction.text() == "BITS.  One  Sign"
    assert prediction.best == Span(10.0, 4, 20)


def predictions_of(squad):
    cut = windows(squad.questions, tokenizer_of(WORDS), 32)
    starts, ends = np.random.default_rng(1).normal(size=(2, len(cut), 32))
    return predict(squad.questions, cut, starts, ends)


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_files_for_the_official_scripts(tmp_path):
    squad = parse_squad(content(question("a", "one bit"), question("b", "scale")))
    given = predictions_of(squad)
    (tmp_path / "null_odds.json").write_text("{}")  # of another file
    write_answers(tmp_path, squad, given, threshold=-math.inf)
    assert read(tmp_path, "predictions.json") == {
        "a": given[0].text(),
        "b": given[1].text(),
    }
    assert all(read(tmp_path, "predictions.json").values())
    assert answers(squad, given, -math.inf) == read(tmp_path, "predictions.json")
    assert not (tmp_path / "null_odds.json").exists()


def test_null_answers_in_files_of_v2(tmp_path):
    squad = parse_squad(content(answerable("a", "one bit"), unanswerable("b")))
    given = predictions_of(squad)
    odds = {p.question.id: p.null_odds for p in given}
    assert odds["a"] != odds["b"]
    threshold = sum(odds.values()) / 2
    write_answers(tmp_path, squad, given, threshold)
    texts = read(tmp_path, "predictions.json")
    assert {name for name, text in texts.items() if not text} == {
        max(odds, key=odds.__getitem__)
    }
    assert read(tmp_path, "null_odds.json") == pytest.approx(odds)
    assert Squad(squad.questions, True) == squad
