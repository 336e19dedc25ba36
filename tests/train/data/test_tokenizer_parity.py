"""Text is cut into the word pieces that Hugging Face's slow `BertTokenizer` finds.

Recorded lines always; with transformers installed, and a folder of real text and
BERT's own vocabulary given by --data-dir, every line of the text as well.
"""

import importlib
import json
import pathlib

import pytest

from train.data.vocabulary import read_vocabulary, tokenizer_of

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "hf_tokenizer.json"


def test_recorded_lines_are_cut_as_hugging_face_cut_them():
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    tokenizer = tokenizer_of(recorded["vocabulary"])
    for line in recorded["lines"]:
        assert tokenizer.encode(line["text"]).tokens == line["pieces"]


def slow_tokenizer(vocabulary):
    pytest.importorskip("transformers", reason="transformers is not installed")
    bert = "transformers.models.bert.tokenization_bert"
    try:  # since transformers 5 the slow one is the legacy one
        return importlib.import_module(f"{bert}_legacy").BertTokenizerLegacy(vocabulary)
    except ModuleNotFoundError:
        return importlib.import_module(bert).BertTokenizer(vocabulary)


@pytest.mark.filterwarnings("default")  # transformers' own are not ours to mend
def test_every_line_of_a_real_text_is_cut_as_hugging_face_cuts_it(request):
    folder = request.config.getoption("data_dir")
    if folder is None:
        pytest.skip(
            "give a folder of texts and bert-base-uncased-vocab.txt: --data-dir"
        )
    vocabulary = folder / "bert-base-uncased-vocab.txt"
    theirs = slow_tokenizer(str(vocabulary))
    ours = tokenizer_of(read_vocabulary(vocabulary))
    texts = [file for file in sorted(folder.glob("*.txt")) if file != vocabulary]
    lines = [
        (file.name, number, line)
        for file in texts
        for number, line in enumerate(
            file.read_text(encoding="utf-8").split("\n"), start=1
        )
    ]
    assert lines
    encoded = ours.encode_batch([line for *_, line in lines])
    for (name, number, line), cut in zip(lines, encoded, strict=True):
        assert cut.tokens == theirs.tokenize(line), f"{name}, line {number}"
        assert cut.ids == theirs.convert_tokens_to_ids(cut.tokens)
