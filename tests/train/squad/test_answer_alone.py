"""Answers without training, to questions whose answers nobody knows."""

import json

import pytest
from fine_tuning import run, write_headless
from runs import PROMOTION

from train.core.errors import InputError
from train.squad import answer
from train.squad.command import answer_alone, parse


def test_questions_whose_answers_nobody_knows_are_answered(
    files, tmp_path, capsys, monkeypatch
):
    plain = {"optimizer": "adam", "freeze_step": None, "steps": 1}
    run(files, **plain, stride=4)
    kept = (files.out / "predictions.json").read_text()
    said = capsys.readouterr().out
    assert f"{files.out}: BERT of 1 layers of 32, 6 questions in 6 windows, " in said
    assert "2 workers (cpu), to step 1" in said
    assert f"{files.out / 'predictions.json'}: the answers to 6 questions" in said
    assert f"{files.out / 'model'}: the weights" in said
    content = json.loads(files.train.read_text())
    for paragraph in content["data"][0]["paragraphs"]:
        for question in paragraph["qas"]:
            del question["answers"]
    asked = tmp_path / "new.json"
    asked.write_text(json.dumps(content))
    resumed = ["--resume", "--out", str(files.out), "--predict", str(asked)]
    before = {path.name for path in files.out.iterdir()}
    with pytest.raises(InputError, match="has none such; give --null-threshold 0, or"):
        answer_alone(parse([*resumed, "--null-threshold", "-2"]).training)
    with PROMOTION:
        answer_alone(parse(resumed).training)
    answers = files.out / "predictions_new.json"
    assert answers.read_text() == kept
    assert {path.name for path in files.out.iterdir()} == before | {answers.name}
    assert f"{answers}: the answers to 6 questions" in capsys.readouterr().out
    # Another program, of other settings, by weights alone.
    asked.write_text(json.dumps({**content, "version": "v2.0"}))
    for start in (files.out, files.out / "model"):
        out = tmp_path / f"by {start.name}"
        flags = f"--batch 6 --workers 2 --predict {asked}".split()
        flags += ["--start", str(start), "--out", str(out)]
        # A run has its own windows, weights alone have none.
        windows = [] if start == files.out else ["--seq", "32", "--stride", "4"]
        with PROMOTION:
            answer_alone(parse([*flags, *windows, "--null-threshold", "1e9"]).training)
        said = "6 questions in 6 windows of 32 tokens, at most 4 word pieces apart"
        assert f"{asked}: {said}" in capsys.readouterr().out
        assert (out / answers.name).read_text() == kept
        assert (out / "null_odds_new.json").exists()
    flags[-1] = str(files.out / "model")  # of Hugging Face's config.json
    with pytest.raises(InputError, match=r"not of a run of train\.squad; give another"):
        answer_alone(parse(flags).training)
    flags[-1] = str(out)
    flags += ["--seq", "32"]
    flags[flags.index("--start") + 1] = str(write_headless(files))
    with pytest.raises(InputError, match="have not learnt to answer; give those of"):
        answer_alone(parse(flags).training)

    compared = []

    def compare(values):
        compared.append(values)
        raise InputError("enough")

    # As processes do whose files hold the same questions in another order.
    monkeypatch.setattr(answer, "check_agreed", compare)
    for _ in range(2):
        with pytest.raises(InputError, match="enough"), PROMOTION:
            answer_alone(parse(resumed).training)
        content["data"][0]["paragraphs"].reverse()
        asked.write_text(json.dumps(content))
    one, other = compared
    assert [name for name in one if one[name] != other[name]] == ["questions"]
