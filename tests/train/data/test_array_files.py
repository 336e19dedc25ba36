"""A corpus larger than memory: cut into word pieces once, in files, and read there."""

import tracemalloc

import numpy as np
import pytest

from train.bert.masked_pairs import pack_spans
from train.core.errors import InputError
from train.data.array_files import growing_array, make_folder, mapped_array
from train.data.corpus import read_corpus, survey
from train.data.tokenized import (
    held_out_documents,
    read_tokens,
    sentences_of,
    write_tokens,
)
from train.data.vocabulary import SPECIAL, tokenizer_of

WORDS = ("transformers", "communicate", "efficiently", "nevertheless")
ENCODE = sentences_of(tokenizer_of((*SPECIAL, *WORDS, ".")))


def test_memory_holds_a_document_and_not_the_corpus(tmp_path):
    """A million characters in one file, which has no blank line."""
    file = tmp_path / "text"
    line = " ".join(WORDS).capitalize() + ". " + " ".join(WORDS[::-1]).capitalize()
    file.write_text(f"{line}.\n" * 14_000)
    tracemalloc.start()
    try:
        about = survey(read_corpus([file]))
        held_out = held_out_documents(about, seed=0)
        write_tokens(tmp_path, read_corpus([file]), held_out, ENCODE, None)
        training, _ = read_tokens(tmp_path)
        pack_spans(training, 128)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert about.documents > 120
    assert len(training.pieces) > file.stat().st_size / 14
    assert peak < file.stat().st_size / 2


def test_held_out_documents_are_not_trained_on(tmp_path):
    write_tokens(tmp_path, [(word,) for word in WORDS], {1, 3}, ENCODE, None)
    training, held_out = read_tokens(tmp_path)
    assert training.pieces.tolist() == [5, 7]
    assert held_out.pieces.tolist() == [6, 8]


def test_values_are_appended_and_a_file_cut_short_is_refused(tmp_path):
    folder = tmp_path / "name" / "training"
    folder.mkdir(parents=True)
    file = folder / "values.npy"
    with growing_array(file, np.int64) as append:
        append(0)
        append(list(range(1, 30)))
    np.testing.assert_array_equal(mapped_array(file), np.arange(30))
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:40], b""):
        file.write_bytes(damaged)
        with pytest.raises(
            InputError,
            match=rf"values\.npy is damaged; delete the folder {folder.parent},",
        ):
            mapped_array(file)
    file.unlink()
    with pytest.raises(InputError, match="is damaged"):
        mapped_array(file)


class Killed(BaseException):
    pass


def test_a_folder_left_half_written_is_made_anew(tmp_path, monkeypatch):
    target = tmp_path / "tokens" / "name"

    def leave_half(folder):
        (folder / "half").touch()
        raise Killed

    with monkeypatch.context() as patch:
        # A killed process removes nothing.
        patch.setattr("train.data.array_files.shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            make_folder(target, leave_half)
    assert not target.exists()
    assert list(target.parent.iterdir())
    make_folder(target, lambda folder: (folder / "whole").touch())
    make_folder(target, leave_half)  # not asked for: the folder is there
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert [path.name for path in target.parent.iterdir()] == ["name"]


def test_the_first_of_two_processes_wins(tmp_path):
    target = tmp_path / "name"

    def fill(folder):
        make_folder(target, lambda other: (other / "first").touch())
        (folder / "second").touch()

    make_folder(target, fill)
    assert [path.name for path in target.iterdir()] == ["first"]
    assert [path.name for path in tmp_path.iterdir()] == ["name"]
