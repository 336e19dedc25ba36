"""A corpus larger than memory: cut into word pieces once, in files, and read there."""

import tracemalloc

import numpy as np
import pytest

from train.bert.masked_pairs import pack_spans, read_spans, write_spans
from train.data.corpus import read_corpus, survey
from train.data.stored import Growing, make, mapped
from train.data.tokenized import held_out_documents, read_tokens, write_tokens
from train.data.vocabulary import SPECIAL, tokenizer_of

WORDS = ("transformers", "communicate", "efficiently", "nevertheless")
TOKENIZER = tokenizer_of((*SPECIAL, *WORDS, "."))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Six million characters in one file, which has no blank line."""
    path = tmp_path_factory.mktemp("corpus") / "text"
    line = " ".join(WORDS).capitalize() + ". " + " ".join(WORDS[::-1]).capitalize()
    path.write_text(f"{line}.\n" * 62_000)
    return path


def test_memory_holds_a_document_and_not_the_corpus(file, tmp_path):
    size = file.stat().st_size
    tracemalloc.start()
    try:
        about = survey(read_corpus([file]))
        held_out = held_out_documents(about, seed=0)
        write_tokens(tmp_path, read_corpus([file]), held_out, TOKENIZER)
        training, _ = read_tokens(tmp_path)
        write_spans(tmp_path, training, 128)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert about.documents > 500
    assert len(training.pieces) > size / 14
    assert peak < size / 2


def test_spans_come_back_as_packed(file, tmp_path):
    documents = [("transformers communicate .",) * 40] * 5
    write_tokens(tmp_path, documents, {1, 4}, TOKENIZER)
    for part in read_tokens(tmp_path):
        folder = tmp_path / str(part.num_documents)
        folder.mkdir()
        write_spans(folder, part, 16)
        spans = read_spans(folder)
        packed = list(pack_spans(part, 16))
        assert [spans[i] for i in range(len(spans))] == packed != []


def test_held_out_documents_are_not_trained_on(tmp_path):
    documents = [(word,) for word in WORDS]
    write_tokens(tmp_path, documents, {1, 3}, TOKENIZER)
    training, held_out = read_tokens(tmp_path)
    assert training.pieces.tolist() == [5, 7]
    assert held_out.pieces.tolist() == [6, 8]


def test_rows_are_appended(tmp_path):
    rows = np.arange(30).reshape(10, 3)
    with Growing(tmp_path / "rows.npy", np.int64, (3,)) as file:
        file.append(rows[:1])
        file.append(rows[1:])
    np.testing.assert_array_equal(mapped(tmp_path / "rows.npy"), rows)
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), rows)


class Killed(BaseException):
    pass


def test_what_was_left_half_written_is_made_anew(tmp_path, monkeypatch):
    target, calls = tmp_path / "tokens" / "name", []

    def fill(folder, *, last=True):
        calls.append(folder)
        (folder / "half").write_text("")
        if not last:
            raise Killed
        (folder / "whole").write_text("")

    with monkeypatch.context() as patch:
        # A killed process removes nothing.
        patch.setattr("train.data.stored.shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            make(target, lambda folder: fill(folder, last=False))
    assert not target.exists()
    assert calls[0].exists()
    make(target, fill)
    make(target, fill)
    assert len(calls) == 2
    assert sorted(path.name for path in target.iterdir()) == ["half", "whole"]
    assert [path.name for path in target.parent.iterdir()] == ["name"]


def test_the_first_of_two_processes_wins(tmp_path):
    target = tmp_path / "name"

    def fill(folder):
        make(target, lambda other: (other / "first").write_text("") and None)
        (folder / "second").write_text("")

    make(target, fill)
    assert [path.name for path in target.iterdir()] == ["first"]
    assert [path.name for path in tmp_path.iterdir()] == ["name"]
