"""Answers survive the way through windows of word pieces and back to characters."""

import dataclasses
import re
import sys
import unicodedata
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from squad_files import EXCERPT

from train.core.errors import InputError
from train.data.pieces import special_pieces
from train.data.vocabulary import (
    SPECIAL,
    read_vocabulary,
    tokenizer_of,
    train_vocabulary,
)
from train.squad.dataset import Answer, Question, read_squad
from train.squad.scores import exact_match
from train.squad.windows import (
    by_question,
    has_most_context,
    sequence,
    windows,
)

MARKS = [c for c in map(chr, range(sys.maxunicode)) if unicodedata.category(c) == "Mn"]
ACCENTS = re.compile(f"[{''.join(MARKS)}]*")
WORDS = (*SPECIAL, "one", "bit", "##s", "a", "sign", "of", "##x", ".", ",", "é", "e")


@cache
def excerpt_vocabulary():
    texts = dict.fromkeys(q.context for q in read_squad(EXCERPT).questions)
    return train_vocabulary([[text] for text in texts], 1500)


def starts_and_ends(context, tokenizer):
    """The characters that word pieces start and end at."""
    offsets = tokenizer.encode(context).offsets
    # Accents that are characters of their own belong to the letter before them.
    ends = {end + len(ACCENTS.match(context, end)[0]) for _, end in offsets}
    return {start for start, _ in offsets}, ends


def check_round_trip(squad, vocabulary, length):
    """Returns how many answers are not of whole word pieces."""
    tokenizer = tokenizer_of(vocabulary)
    torn = 0
    cut = windows(squad.questions, tokenizer, length)
    for question, own in zip(squad.questions, by_question(cut), strict=True):
        assert {squad.questions[window.question].id for window in own} == {question.id}
        found = {
            window.characters(*window.places) for window in own if any(window.places)
        }
        (answer, *_) = question.answers
        end = answer.start + len(answer.text)
        starts, ends = starts_and_ends(question.context, tokenizer)
        ((first, last),) = found  # one and the same, however many windows hold it
        assert first == max(s for s in starts if s <= answer.start)
        assert last == min(e for e in ends if e >= end)
        if answer.start in starts and end in ends:
            assert question.context[first:last] == answer.text
        else:
            torn += 1
            assert answer.text in question.context[first:last]
    return torn


@pytest.mark.parametrize("length", [96, 384])
def test_every_answer_of_squad_survives(length):
    squad = read_squad(EXCERPT)
    assert check_round_trip(squad, excerpt_vocabulary(), length) <= 1


@pytest.mark.parametrize("length", [192, 384, 512])
def test_every_answer_of_given_files_survives(request, length):
    folder = request.config.getoption("data_dir")
    if folder is None:
        pytest.skip("give a folder of squad_*.json and BERT's vocabulary: --data-dir")
    vocabulary = read_vocabulary(folder / "bert-base-uncased-vocab.txt")
    files = sorted(folder.glob("squad_*.json"))
    assert files
    for file in files:
        squad = read_squad(file)
        answered = [q for q in squad.questions if q.answers]
        squad = dataclasses.replace(squad, questions=tuple(answered))
        torn = check_round_trip(squad, vocabulary, length)
        print(f"{file.name}: {torn} of {len(answered)} answers are of torn words")


def test_accents_that_are_characters_stay_with_their_letters():
    words = (*SPECIAL, "one", "cafe", "e", "of", ",")
    text = "one cafe\u0301 of e\u0301\u0323, e"
    for written in ("cafe\u0301", "e\u0301\u0323", "one", "e\u0301\u0323, e"):
        start = text.index(written)
        asked = Question("q", "of", text, (Answer(written, start),))
        (window,) = windows([asked], tokenizer_of(words), 16)
        first, last = window.characters(*window.places)
        assert text[first:last] == written


@st.composite
def cases(draw):
    words = st.sampled_from(
        ["one", "bits", "a", "é", "signx", ".", " ", "\t", "zz", ","]
    )
    context = " ".join(draw(st.lists(words, max_size=25)))
    answers = ()
    if context.strip():
        start = draw(st.integers(0, len(context) - 1))
        text = context[start : draw(st.integers(start + 1, len(context)))]
        answers = (Answer(text, start),) if text.strip() else ()
    asked = " ".join(draw(st.lists(words, max_size=3)))
    return Question("q", asked, context, answers)


@given(
    st.lists(cases(), min_size=1, max_size=3), st.integers(12, 30), st.integers(1, 20)
)
def test_windows_hold_their_texts_and_spans(questions, length, stride):
    tokenizer = tokenizer_of(WORDS)
    pieces = special_pieces(WORDS)
    cut = windows(questions, tokenizer, length, stride=stride)
    groups = list(by_question(cut))
    assert [own[0].question for own in groups] == list(range(len(questions)))
    for question, own in zip(questions, groups, strict=True):
        encoding = tokenizer.encode(question.context)
        asked = tokenizer.encode(question.text).ids
        covered = np.zeros(len(encoding.ids), int)
        judged = np.zeros(len(encoding.ids), int)
        for window, mask in zip(own, has_most_context(own), strict=True):
            covered[window.first : window.last] += 1
            judged[window.first : window.last] += mask
            text = encoding.ids[window.first : window.last]
            expected = [pieces.cls, *asked, pieces.sep, *text, pieces.sep]
            row = sequence(window, pieces, length)
            used = len(expected)
            assert row.token_ids.tolist() == expected + [pieces.pad] * (length - used)
            assert row.lengths == used
            second = used - 2 - len(asked)
            assert row.token_types[:used].tolist() == [0] * (used - second) + (
                [1] * second
            )
            assert not np.any(row.token_types[used:])
            assert (row.starts, row.ends) == window.places
            for i, piece in enumerate(text):
                span = window.characters(window.start + i, window.start + i)
                assert span == encoding.offsets[window.first + i]
                assert row.token_ids[window.start + i] == piece
            if any(window.places):
                (answer,) = question.answers
                end = answer.start + len(answer.text)
                held = [
                    (max(s, answer.start) < min(e, end)) for s, e in encoding.offsets
                ]
                shift = window.first - window.start
                start, last = (place + shift for place in window.places)
                assert all(held[start : last + 1])
                assert sum(held) == last + 1 - start
        assert np.all(covered >= 1)
        assert np.all(judged == 1)
        steps = np.diff([window.first for window in own])
        assert np.all((steps >= 1) & (steps <= stride))


def test_windows_start_a_stride_apart():
    question = Question("q", "one", "bit " * 30, ())
    own = windows([question], tokenizer_of(WORDS), 14, stride=4)  # 10 pieces each
    assert [(w.first, w.last) for w in own] == [
        (0, 10), (4, 14), (8, 18), (12, 22), (16, 26), (20, 30)
    ]  # fmt: skip
    judged = has_most_context(own)
    # Piece 7 has 2 pieces after it in the first window, 3 before it in the second.
    assert not judged[0][7]
    assert judged[1][3]
    assert judged[0][:7].all()


def test_answers_out_of_a_window_are_not_in_it():
    question = Question("q", "one", "bit " * 9 + "sign", (Answer("sign", 36),))
    *others, last = windows([question], tokenizer_of(WORDS), 10, stride=2)
    assert [window.places for window in others] == [(0, 0), (0, 0)]
    assert last.places == (3 + 5, 3 + 5)
    assert last.characters(*last.places) == (36, 40)
    across = Question("q", "one", "bit " * 5 + "sign bit", (Answer("bit sign", 16),))
    (whole, *_) = windows([across], tokenizer_of(WORDS), 10)
    assert (whole.first, whole.last) == (0, 6)
    assert whole.places == (3 + 4, 3 + 5)
    (torn, *_) = windows([across], tokenizer_of(WORDS), 9)
    assert (torn.first, torn.last) == (0, 5)
    assert torn.places == (0, 0)


def test_long_questions_are_cut_and_no_room_is_refused():
    question = Question("q", "one " * 100, "bit", ())
    (window,) = windows([question], tokenizer_of(WORDS), 80)
    assert len(window.asked) == 64
    with pytest.raises(InputError, match=r"67 tokens has no room .* of 64 word"):
        windows([question], tokenizer_of(WORDS), 67)


def test_pieces_of_words_are_whole_answers():
    """An answer inside a word is given with what belongs to its word pieces."""
    question = Question("q", "a", "a bits of", (Answer("it", 3),))
    (window,) = windows([question], tokenizer_of(WORDS), 16)
    first, last = window.characters(*window.places)
    assert question.context[first:last] == "bit"
    assert exact_match("bit", question.answers[0].text) == 0
