"""SQuAD files are read whole, and what is wrong with one is said exactly."""

import json

import pytest
from squad_files import (
    CONTEXT,
    EXCERPT,
    answerable,
    content,
    question,
    unanswerable,
)

from train.core.errors import InputError
from train.squad.dataset import Answer, parse_squad, read_squad


def test_an_excerpt_of_squad_is_read_whole():
    squad = read_squad(EXCERPT)
    articles = json.loads(EXCERPT.read_text(encoding="utf-8"))["data"]
    expected = [
        (
            qa["id"],
            qa["question"],
            paragraph["context"],
            tuple((a["text"], a["answer_start"]) for a in qa["answers"]),
        )
        for article in articles
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    ]
    assert [
        (q.id, q.text, q.context, tuple(map(tuple, q.answers))) for q in squad.questions
    ] == expected
    assert not squad.has_null
    assert any(ord(letter) > 127 for *_, context, _ in expected for letter in context)


def test_questions_without_an_answer_are_read():
    squad = parse_squad(content(answerable("a", "one bit"), unanswerable("b")))
    assert squad.has_null
    first, second = squad.questions
    assert first.answers == (Answer("one bit", CONTEXT.index("one bit")),)
    assert second.answers == ()


def broken(**changes):
    return content({**question("a", "one bit"), **changes})


def without(key):
    qa = question("a", "one bit")
    del qa[key]
    return content(qa)


def wrong_answer(**changes):
    return broken(answers=[{"text": "one bit", "answer_start": 18, **changes}])


NOT_SQUAD = "not a SQuAD file of v1.1 or v2.0: "


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([], f"{NOT_SQUAD}TypeError in the file: list indices"),
        ({"data": ["x"]}, f"{NOT_SQUAD}TypeError in article 1: string indices"),
        (without("id"), f"{NOT_SQUAD}KeyError in article 1, a question after []: 'id'"),
        (
            broken(question=7),
            f"{NOT_SQUAD}TypeError in article 1, a question after []: 7 is",
        ),
        (without("answers"), "has no answers; one that cannot be answered has"),
        (wrong_answer(answer_start=1.0), f"{NOT_SQUAD}TypeError in question 'a': sl"),
        (
            wrong_answer(answer_start=17),
            "question 'a': its answer 'one bit' is said to start at character 17, "
            "where the text has ' one bi'; correct answer_start",
        ),
        (wrong_answer(answer_start=-49), "character -49, where the text has ''"),
        (wrong_answer(text=" "), "question 'a' has an empty answer"),
        (broken(is_impossible=True), "question 'a' is marked impossible and has ans"),
        (
            content(question("a", "bit"), question("a", "one")),
            "two questions have the id 'a'",
        ),
        ({"data": []}, "there are no questions"),
    ],
)
def test_what_is_wrong_is_said(contents, message, tmp_path):
    file = tmp_path / "dev.json"
    file.write_text(json.dumps(contents))
    with pytest.raises(InputError) as error:
        read_squad(file)
    assert str(error.value).startswith(str(file))
    assert message in str(error.value)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.json cannot be read \(No such file"):
        read_squad(tmp_path / "none.json")
    file = tmp_path / "dev.json"
    for junk in (b"a,b\n", b"\xff\xfe"):
        file.write_bytes(junk)
        with pytest.raises(InputError, match=r"dev\.json is not JSON .* give a SQuAD"):
            read_squad(file)
    text = json.dumps(content(question("a", "bit"))).encode()
    file.write_bytes(b"\xef\xbb\xbf" + text)  # a byte order mark
    assert len(read_squad(file).questions) == 1
