"""Answers survive the way through windows of word pieces and back to characters."""

import dataclasses
import json
import pathlib
import re
import sys
import unicodedata

import pytest
from squad_files import EXCERPT

from train.core.errors import InputError
from train.data.vocabulary import (
    SPECIAL,
    read_vocabulary,
    special_pieces,
    tokenizer_of,
    train_vocabulary,
)
from train.squad.dataset import Answer, Question, read_squad
from train.squad.windows import (
    NOWHERE,
    by_question,
    has_most_context,
    sequence,
    windows,
)

MARKS = [c for c in map(chr, range(sys.maxunicode)) if unicodedata.category(c) == "Mn"]
ACCENTS = re.compile(f"[{''.join(MARKS)}]*")
WORDS = (*SPECIAL, "one", "bit", "##s", "a", "sign", "of", "##x", ".", ",", "é", "e")
HUGGING_FACE = pathlib.Path(__file__).parents[2] / "golden" / "hf_squad_windows.json"


def cut(question, length, words=WORDS, **options):
    return windows([question], tokenizer_of(words), length, **options)


def answered(text, answer, asked="one"):
    return Question("q", asked, text, (Answer(answer, text.index(answer)),))


def learnt(window, question):
    """The text that the window says is the answer."""
    first, last = window.characters(*window.answer)
    return question.context[first:last]


def test_windows_are_those_of_hugging_faces_run_squad():
    golden = json.loads(HUGGING_FACE.read_text(encoding="utf-8"))
    length, stride = golden["max_seq_length"], golden["doc_stride"]
    for question in read_squad(EXCERPT).questions:
        if question.id in golden["windows"]:
            made = cut(question, length, golden["vocabulary"], stride=stride)
            judged = [
                "".join(str(int(x)) for x in pieces)
                for pieces in has_most_context(made)
            ]
            assert [
                [window.tokens.tolist(), window.text_place, *window.answer, here]
                for window, here in zip(made, judged, strict=True)
            ] == golden["windows"].pop(question.id)
    assert not golden["windows"]


def check_round_trip(squad, vocabulary, length):
    """Returns the number of answers that are not of whole word pieces."""
    tokenizer = tokenizer_of(vocabulary)
    torn = 0
    made = by_question(windows(squad.questions, tokenizer, length))
    for question, of_question in zip(squad.questions, made, strict=True):
        assert {squad.questions[w.question].id for w in of_question} == {question.id}
        answer = question.answers[0]
        end = answer.start + len(answer.text)
        offsets = tokenizer.encode(question.context).offsets
        # Accents that are characters of their own belong to the letter before them.
        ends = {last + len(ACCENTS.match(question.context, last)[0])
                for _, last in offsets}  # fmt: skip
        starts = {first for first, _ in offsets}
        whole = (
            max(s for s in starts if s <= answer.start),
            min(e for e in ends if e >= end),
        )
        # One and the same, however many windows hold it.
        assert {w.characters(*w.answer) for w in of_question if any(w.answer)} == {
            whole
        }
        torn += whole != (answer.start, end)
    return torn


def test_every_answer_of_squad_survives():
    squad = read_squad(EXCERPT)
    texts = dict.fromkeys(q.context for q in squad.questions)
    vocabulary = train_vocabulary([[text] for text in texts], 1500)
    for length in (96, 384):
        assert check_round_trip(squad, vocabulary, length) <= 1


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
        with_answers = tuple(q for q in squad.questions if q.answers)
        squad = dataclasses.replace(squad, questions=with_answers)
        torn = check_round_trip(squad, vocabulary, length)
        print(f"{file.name}: {torn} of {len(with_answers)} answers are of torn words")


@pytest.mark.parametrize(
    "answer", ["cafe\u0301", "e\u0301\u0323", "one", "e\u0301\u0323, e"]
)
def test_accents_that_are_characters_stay_with_their_letters(answer):
    question = answered("one cafe\u0301 of e\u0301\u0323, e", answer)
    (window,) = cut(question, 16, (*SPECIAL, "one", "cafe", "e", "of", ","))
    assert learnt(window, question) == answer


def test_a_window_is_padded_and_overlaps_its_neighbours():
    question = answered("one bits of a sign", "sign", asked="a bit")
    pieces = special_pieces(WORDS)
    first, second = cut(question, 9, stride=2)  # 4 of the text's 6 pieces each
    assert second.first == 2
    ids = (
        [WORDS.index(x) for x in ("a", "bit")],
        [WORDS.index(x) for x in ("##s", "of", "a", "sign")],
    )
    row = sequence(second, pieces, 12)
    expected = [pieces.cls, *ids[0], pieces.sep, *ids[1], pieces.sep, *[pieces.pad] * 3]
    assert row.token_ids.tolist() == expected
    assert row.token_types.tolist() == [0] * 4 + [1] * 5 + [0] * 3
    assert (row.lengths, row.starts, row.ends) == (9, 7, 7)
    assert first.answer == NOWHERE
    assert learnt(second, question) == "sign"


def test_a_piece_is_judged_where_it_has_most_text_about_it():
    question = Question("q", "one", "bit " * 30, ())
    same = cut(question, 14, stride=4)  # 10 pieces each
    assert [w.first for w in same] == [0, 4, 8, 12, 16, 20]
    judged = has_most_context(same)
    # Piece 7 has 2 pieces after it in the first window, 3 before it in the second.
    assert not judged[0][7]
    assert judged[1][3]
    assert judged[0][:7].all()
    # A hundredth of 300 pieces more counts for more than one piece of text about it.
    _, short = has_most_context(cut(Question("q", "one", "bit " * 301, ()), 304))
    assert short.nonzero()[0].tolist() == [300 - 128]


def test_an_answer_across_the_end_of_a_window_is_not_in_it():
    question = answered("bit bit bit bit bit sign bit", "bit sign")
    whole, *_ = cut(question, 10)
    assert whole.answer == (3 + 4, 3 + 5)
    torn, *_ = cut(question, 9)
    assert torn.answer == NOWHERE


def test_long_questions_are_cut_and_no_room_is_refused():
    question = Question("q", "one bits " * 33, "bit", ())
    (window,) = cut(question, 80)
    one, bit, s = (WORDS.index(piece) for piece in ("one", "bit", "##s"))
    assert window.tokens[1:65].tolist() == [one, bit, s] * 21 + [one]
    assert window.text_place == 66
    with pytest.raises(InputError, match=r"67 tokens has no room .* of 64 word"):
        cut(question, 67)
