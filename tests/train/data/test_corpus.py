"""Texts become documents, vocabularies and tokens, or one clear sentence."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from train.core.errors import InputError
from train.data.corpus import (
    DOCUMENT_CHARACTERS,
    Survey,
    check_outside,
    read_corpus,
    split_documents,
    survey,
)
from train.data.tokenized import (
    held_out_documents,
    read_tokens,
    sentences_of,
    write_tokens,
)
from train.data.vocabulary import (
    SPECIAL,
    read_vocabulary,
    tokenizer_of,
    train_vocabulary,
    write_vocabulary,
)

TEXT = "The sun is a star. The moon is not.\n\nRivers are long."


@pytest.fixture(scope="module")
def reference():
    return list(read_corpus([]))


def test_the_default_corpus_is_megabytes_of_english(reference):
    text = " ".join(sentence for document in reference for sentence in document)
    assert len(text) > 1.5e6
    assert len(reference) > 400
    # The commonest words of English, and of no programming language.
    words = text.lower().split()
    assert words.count("the") / len(words) > 0.03
    assert words.count("of") / len(words) > 0.01
    assert "****" not in text


def test_files_and_folders_are_read_in_order_without_hidden_ones(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {
        "b/x.txt": "Third here.",
        "a.txt": "Second here.",
        ".hidden": "Never.",
        ".git/config": "Never.",
        "first": "\ufeffFirst here.",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    first = tmp_path / "first"
    documents = read_corpus([first, tmp_path / "b", tmp_path / "a.txt"])
    assert [sentence for (sentence,) in documents] == [
        "First here.",
        "Third here.",
        "Second here.",
    ]
    documents = read_corpus([tmp_path])
    assert [sentence for (sentence,) in documents] == [
        "Second here.",
        "Third here.",
        "First here.",
    ]
    # It could be trained on and held out.
    with pytest.raises(InputError, match=r"has .*first twice; leave one out"):
        list(read_corpus([first, tmp_path]))


def split(text):
    return list(split_documents(text.split("\n")))


def sizes(documents):
    return [sum(map(len, document)) for document in documents]


def test_a_run_does_not_write_where_its_corpus_is_read(tmp_path):
    corpus = [tmp_path / "file.txt", tmp_path / "texts"]
    for folder in tmp_path / "runs", tmp_path / "texts/.runs", tmp_path / "texts2":
        check_outside(corpus, out=folder, tokens=None)
    for folder in tmp_path / "texts", tmp_path / "texts/runs/a":
        with pytest.raises(InputError, match=r"--out .* lies in the corpus .*/texts,"):
            check_outside(corpus, out=folder, tokens=None)


def test_long_texts_are_cut_between_paragraphs():
    paragraphs = [
        f"Paragraph {i} is here. " + "Word after word. " * 50 for i in range(40)
    ]
    documents = split("\n\n".join(paragraphs))
    assert len(documents) > 2
    assert all(document[0].startswith("Paragraph") for document in documents)
    assert max(sizes(documents)) < DOCUMENT_CHARACTERS + 1000
    assert [s for d in documents for s in d] == [
        s for p in paragraphs for d in split(p) for s in d
    ]


LINES = "".join(
    f"Line {i} is a paragraph. It has two sentences.\n" for i in range(2000)
)


@pytest.mark.parametrize("heading", ["", "Title.\n\n"])
def test_long_texts_without_blank_lines_are_cut_between_lines(heading):
    documents = split(heading + LINES)
    assert len(documents) > 8
    assert max(sizes(documents)) < DOCUMENT_CHARACTERS + 100
    assert all(document[0].startswith("Line") for document in documents[1:])
    assert [s for document in documents for s in document] == heading.split() + [
        sentence
        for i in range(2000)
        for sentence in (f"Line {i} is a paragraph.", "It has two sentences.")
    ]
    held_out_documents(survey(documents), seed=0)


def test_a_table_of_numbers_is_no_document():
    assert split("1, 2, 3\n" * 5000 + "\nText after it.") == [("Text after it.",)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b" \n\n\t\n", "holds no text"),
        (b"1, 2, 3\n--- ***", "holds no text"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "is not UTF-8 text"),
        (b"plain\0binary", "is binary, not text"),
    ],
)
def test_files_without_text_are_refused(tmp_path, content, message):
    file = tmp_path / "corpus.txt"
    file.write_bytes(content)
    for path in (file, tmp_path):
        with pytest.raises(InputError, match=message) as caught:
            list(read_corpus([path]))
        assert str(path) in str(caught.value)


def test_missing_and_unreadable_files_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"nowhere cannot be read \(No such file"):
        list(read_corpus([tmp_path / "nowhere"]))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="holds no text"):
        list(read_corpus([empty]))


def test_no_part_of_a_folder_is_left_out_without_a_word(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    link = tmp_path / "b.txt"
    link.symlink_to("nowhere")
    with pytest.raises(InputError, match=r"b\.txt cannot be read \(No such file"):
        list(read_corpus([tmp_path]))
    link.unlink()
    link.symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(InputError, match=r"b\.txt, a link to a folder"):
        list(read_corpus([tmp_path]))
    link.unlink()
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def forbid(path):  # root is forbidden nothing
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", forbid)
    with pytest.raises(InputError, match=r"closed cannot be read \(Permission denied"):
        list(read_corpus([tmp_path]))


def test_the_fingerprint_tells_texts_apart():
    def fingerprint(documents):
        return survey(documents).fingerprint

    one = [("a b", "c")]
    assert fingerprint(one) == fingerprint([("a b", "c")])
    assert fingerprint(one) != fingerprint([("a b",), ("c",)])
    assert fingerprint(one) != fingerprint([("a", "b c")])


def test_a_twentieth_of_the_documents_is_held_out():
    corpus = Survey("", documents=100)
    held_out = held_out_documents(corpus, seed=3)
    assert len(held_out) == 5
    assert held_out < set(range(100))
    assert held_out_documents(corpus, seed=3) == held_out
    assert held_out_documents(corpus, seed=4) != held_out


def test_too_small_a_corpus_is_refused():
    with pytest.raises(InputError, match="makes 3 documents, of about 10,000 char"):
        held_out_documents(survey([("a",)] * 3), seed=0)


def test_a_vocabulary_is_learnt_from_the_text(reference):
    vocabulary = train_vocabulary(reference[:80], 1000)
    assert len(vocabulary) == len(set(vocabulary)) == 1000
    assert vocabulary[: len(SPECIAL)] == SPECIAL
    assert {"statement", "object", "##ing"} <= set(vocabulary)
    tokenizer = tokenizer_of(vocabulary)
    encoded = tokenizer.encode("The OBJECT is returned.")
    assert encoded.tokens[:3] == ["the", "object", "is"]
    unknown = vocabulary.index("[UNK]")
    sentences = [sentence for document in reference[:80] for sentence in document]
    assert not any(unknown in e.ids for e in tokenizer.encode_batch(sentences))


def test_a_vocabulary_depends_on_the_text_alone(tmp_path):
    # The trainer's hash tables are seeded anew in each process.
    (tmp_path / "text").write_text(TEXT * 3 + " Ünïcode étoiles; stars, starry!")
    program = (
        "import sys; from pathlib import Path;"
        "from train.data.corpus import read_corpus;"
        "from train.data.vocabulary import train_vocabulary;"
        "print(train_vocabulary(read_corpus([Path(sys.argv[1])]), 60))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "text")],
            cwd=Path(__file__).parents[3],
            capture_output=True,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1


def test_rare_letters_do_not_crowd_out_words():
    rare = "".join(chr(0x4E00 + i) for i in range(500))
    vocabulary = train_vocabulary([(rare, "star " * 50, "starry stars " * 50)], 100)
    assert len(vocabulary) <= 100
    assert "star" in vocabulary


def test_a_vocabulary_comes_back_as_written(tmp_path):
    vocabulary = (*SPECIAL, "a", "\u00a0", "##\u2028", "#")
    file = tmp_path / "vocab.txt"
    write_vocabulary(file, vocabulary)
    assert read_vocabulary(file) == vocabulary
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # a byte order mark
    assert read_vocabulary(file) == vocabulary


def test_capitals_make_a_cased_vocabulary():
    assert tokenizer_of((*SPECIAL, "star", "Star")).encode("Star").ids == [6]
    assert tokenizer_of((*SPECIAL, "star")).encode("Star").ids == [5]
    assert tokenizer_of((*SPECIAL, "star", "[URL]", "<S>")).encode("Star").ids == [5]
    assert tokenizer_of((*SPECIAL, "star"), cased=True).encode("Star").ids == [1]


@pytest.mark.parametrize("missing", SPECIAL)
def test_a_vocabulary_without_a_special_token_is_refused(tmp_path, missing):
    file = tmp_path / "vocab.txt"
    write_vocabulary(file, [*(t for t in SPECIAL if t != missing), "star"])
    with pytest.raises(InputError) as caught:
        read_vocabulary(file)
    assert f"has no {missing}; give one of a BERT" in str(caught.value)


def test_unusable_vocabularies_are_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_vocabulary(tmp_path / "missing.txt")
    file = tmp_path / "vocab.txt"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"cannot be read .*'utf-8' codec"):
        read_vocabulary(file)
    write_vocabulary(file, [*SPECIAL, "star", "star"])
    with pytest.raises(InputError, match="the line 'star' 2 times"):
        read_vocabulary(file)
    with pytest.raises(InputError, match="leaves no room"):
        train_vocabulary([("word",)], 5)


def test_long_stretches_are_cut_into_equal_ones_and_empty_ones_left_out(tmp_path):
    vocabulary = (*SPECIAL, "sun", "moon")
    words = ["sun", "moon", "moon"] * 100
    documents = [["\u200b", " ".join(words[:n])] for n in (1, 64, 65, 0, 131, 299)]
    documents[-1][-1] += " star"
    encode = sentences_of(tokenizer_of(vocabulary))
    assert write_tokens(tmp_path, documents, (), encode, 1) == 1 / 561
    corpus, _ = read_tokens(tmp_path)
    lengths = np.diff(corpus.sentences).tolist()
    assert lengths == [1, 64, 32, 33, 43, 44, 44, 60, 60, 60, 60, 60]
    assert np.diff(corpus.documents).tolist() == [1, 1, 2, 3, 5]
    whole = corpus.text(7, 12)
    assert [vocabulary[piece] for piece in whole] == [*words[:-1], "[UNK]"]
