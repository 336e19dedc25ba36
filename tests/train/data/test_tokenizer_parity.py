"""Text is cut into the word pieces that Hugging Face's slow `BertTokenizer` finds."""

import json
import pathlib

from train.data.vocabulary import tokenizer_of

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "hf_tokenizer.json"


def test_recorded_lines_are_cut_as_hugging_face_cut_them():
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    tokenizer = tokenizer_of(recorded["vocabulary"])
    for line in recorded["lines"]:
        assert tokenizer.encode(line["text"]).tokens == line["pieces"]
