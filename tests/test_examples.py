"""The examples run, and do what they say."""

import re

from test_readme import ROOT, output_of

EXAMPLES = ROOT / "docs" / "examples"


def printed_by(name, folder):
    return output_of((EXAMPLES / name).read_text(encoding="utf-8"), folder)


def test_an_nnx_model_with_its_statistics(tmp_path):
    said = printed_by("nnx_batch_norm.py", tmp_path)
    accuracy, mean = re.search(
        r"accuracy ([\d.]+), largest mean ([\d.]+)", said
    ).groups()
    assert float(accuracy) > 0.8, "a quarter by chance"
    assert float(mean) > 0, "the statistics were learnt, too"
