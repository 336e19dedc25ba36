import dataclasses
import json

import pytest
from squad_files import EXCERPT

from benchmarks.convergence import squad as convergence_squad
from benchmarks.convergence.arms import (
    ADAM,
    ARMS,
    COMPRESSED_GRADIENTS,
    FROZEN,
    ONEBIT_ADAM,
)
from benchmarks.convergence.run import Case
from benchmarks.convergence.squad import RANDOM, Config, scored, split, table
from train.squad.dataset import read_squad


def test_every_fifth_paragraph_is_asked_about(tmp_path):
    content = json.loads(EXCERPT.read_text())
    paragraphs = [p for article in content["data"] for p in article["paragraphs"]]
    many = {**content, "data": [{"title": "", "paragraphs": paragraphs}] * 3}
    for article in range(3):
        text = json.dumps(paragraphs)
        for paragraph in paragraphs:
            for qa in paragraph["qas"]:
                text = text.replace(qa["id"], f"{article}{qa['id']}")
        many["data"][article] = {"title": "", "paragraphs": json.loads(text)}
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps(many))
    split(squad, tmp_path / "learnt.json", tmp_path / "asked.json")
    learnt, asked, whole = (
        {q.id: q.context for q in read_squad(file).questions}
        for file in (tmp_path / "learnt.json", tmp_path / "asked.json", squad)
    )
    assert {**learnt, **asked} == whole
    assert not learnt.keys() & asked.keys()
    total = 3 * len(paragraphs)
    found = json.loads((tmp_path / "asked.json").read_text())["data"][0]["paragraphs"]
    assert len(found) == total // 5


class Here:
    """What runs at once, in this process."""

    def __init__(self, **_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *args):
        self._result = function(*args)
        return self

    def result(self):
        return self._result


def test_each_arm_is_fine_tuned_once_from_its_own_weights(tmp_path, monkeypatch):
    asked = []

    def score(flags):
        asked.append(flags)
        own = float(len(asked))
        return {"F1": own, "exact match": 2.0, "F1 of what was learnt": 3.0}

    monkeypatch.setattr(convergence_squad, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(convergence_squad, "score", score)
    cases = [Case(ADAM, rate, 0, 8, 4) for rate in (1.0, 2.0)]
    cases += [Case(arm, 2.0, seed, 8, 4) for seed in (0, 1) for arm in ARMS]
    # Not of the comparison: another rate, other workers, another freeze step.
    cases += [
        Case(ONEBIT_ADAM, 1.0, 0, 8, 4),
        Case(ADAM, 2.0, 0, 16, 4),
        Case(ONEBIT_ADAM, 2.0, 0, 8, "auto"),
    ]
    study = tmp_path / "study.json"
    runs = [{"case": case._asdict()} for case in dict.fromkeys(cases)]
    study.write_text(json.dumps({"settings": {"model": "mini"}, "runs": runs}))
    config = Config(EXCERPT, study, tmp_path / "runs", tmp_path / "scores.json")
    found = scored(config)
    planned = [(r["arm"], r["optimizer"], r["seed"]) for r in found]
    once = [(arm, "adam") for arm in (*ARMS, RANDOM)] + [(ONEBIT_ADAM, "onebit_adam")]
    assert sorted(planned) == sorted((*x, seed) for x in once for seed in (0, 1))
    for flags, (arm, optimizer, seed) in zip(asked, planned, strict=True):
        assert (flags.optimizer, flags.seed) == (optimizer, seed)
        # The size is that of the weights, where there are any.
        assert flags.model == ("mini" if arm == RANDOM else None)
        if arm == RANDOM:
            assert flags.start is None
        else:
            assert flags.start.parent.name == Case(arm, 2.0, seed, 8, 4).name
            assert flags.vocab.parent == flags.start
    assert len({flags.out for flags in asked}) == len(asked)
    assert scored(config) == found  # nothing is trained twice
    assert len(asked) == len(found)
    lines = table(found).splitlines()
    assert len(lines) == 2 + len(once)
    row = next(line for line in lines if line.startswith(f"| {FROZEN} | adam"))
    each = [r["F1"] for r in found if r["arm"] == FROZEN]
    mean = sum(each) / 2
    assert f"| {mean:.1f} ({each[0]:.1f} {each[1]:.1f}) |" in row
    assert COMPRESSED_GRADIENTS in table(found)
    with pytest.raises(SystemExit, match="other settings"):
        scored(dataclasses.replace(config, steps=7))
    squad = tmp_path / "other.json"
    squad.write_text(EXCERPT.read_text() + " ")
    with pytest.raises(SystemExit, match="other settings"):
        scored(dataclasses.replace(config, squad=squad))
    study.rename(tmp_path / "study-2.json")
    with pytest.raises(SystemExit, match="other settings"):
        scored(dataclasses.replace(config, study=tmp_path / "study-2.json"))
