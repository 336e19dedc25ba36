"""Every published table follows from the JSON beside it."""

import json
from pathlib import Path

import pytest

from benchmarks.convergence import many_workers, report
from benchmarks.convergence.plan import read_plan
from benchmarks.convergence.runs import Store
from benchmarks.network import whole_run
from benchmarks.network.results import MARK, read_results, tables
from benchmarks.page import fill

DOCS = Path(__file__).parents[2] / "docs"
STUDIES = [
    f for f in (DOCS / "studies").glob("*.toml") if f.with_suffix(".md").exists()
]


def stored(name):
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


def whole_runs():
    plan, steps = (DOCS / "studies" / name for name in ("long.toml", "long-steps.json"))
    read = whole_run.read(plan, steps, "decoder, documentation")
    return whole_run.text(whole_run.whole_runs(*read))


@pytest.mark.parametrize(
    ("page", "mark", "text"),
    [
        ("network.md", whole_run.MARK, whole_runs),
        (
            "studies/network.md",
            MARK,
            lambda: tables(read_results(DOCS / "studies/network.json")),
        ),
    ],
    ids=["whole runs", "network"],
)
def test_a_page_is_what_its_json_says(page, mark, text):
    published = (DOCS / page).read_text(encoding="utf-8")
    assert fill(published, mark, text()) == published


def test_whole_runs_are_of_the_last_round_that_has_the_arms():
    plan, steps = (DOCS / "studies" / name for name in ("long.toml", "long-steps.json"))
    task, earlier = "decoder, documentation", "1-bit Adam, 4 bits in the warm-up"
    runs, _ = whole_run.read(plan, steps, task, arms=(earlier,))
    assert list(runs) == ["Adam", earlier]
    assert {run.case.seed for run in runs["Adam"]} == {50, 51, 52}
    with pytest.raises(SystemExit, match="has no round of the arms LAMB"):
        whole_run.read(plan, steps, task, arms=("LAMB",))


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_a_studys_page_is_what_its_runs_say(file):
    plan = read_plan(file)
    runs = Store(file.with_suffix(".json"), plan).runs
    assert report.page(file.name, plan, runs) == file.with_suffix(".md").read_text()


def test_the_page_of_many_workers_is_what_its_json_says():
    page = (DOCS / "studies" / "many-workers.md").read_text()
    assert many_workers.page(stored("studies/many-workers.json")["rows"]) == page


def test_a_page_keeps_all_but_its_tables():
    page = "a\n<!-- measured -->\nold\n<!-- end of measured -->\nb\n"
    filled = "a\n<!-- measured -->\n\nnew\n\n<!-- end of measured -->\nb\n"
    assert fill(page, "measured", "new") == filled
    assert fill(filled, "measured", "new") == filled
    with pytest.raises(SystemExit, match="<!-- gpu --> and <!-- end of gpu -->"):
        fill(page, "gpu", "new")
