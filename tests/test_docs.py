"""The pages say what is there: every public name, every cost."""

import operator
import pathlib
import re
import tomllib

import optax

import onebit_jax
from benchmarks.costs import tables

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_reference_has_every_public_name_and_none_that_is_gone():
    told = [
        name
        for page in (DOCS / "api").glob("*.rst")
        for name in re.findall(
            r"^\.\. auto(?:class|function):: ([\w.]+)$",
            page.read_text("utf-8"),
            re.MULTILINE,
        )
    ]
    assert sorted(set(told)) == sorted(told)
    assert set(onebit_jax.__all__) <= set(told)
    for name in told:
        assert operator.attrgetter(name.removeprefix("onebit_jax."))(onebit_jax), name


def test_the_lines_that_choosing_ends_in_are_code():
    page = (DOCS / "choosing.md").read_text("utf-8")
    lines = re.findall(r"`(\w+\([^`]*\brate\b[^`]*\))`", page)
    known = vars(onebit_jax) | {"optax": optax, "rate": 1e-3, "n": 10, "b1": 0.9}
    assert len(lines) >= 7
    for line in lines:
        assert eval(line, known), line


def test_the_version_is_the_changelogs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    changelog = (DOCS / "changelog.md").read_text("utf-8")
    newest, rest = re.search(r"^## ([\d.]+)(.*)$", changelog, re.MULTILINE).groups()
    dev = ".dev0" if rest == ", unreleased" else ""
    assert project["version"] == newest + dev


def test_the_costs_are_those_of_the_code():
    assert tables() in (DOCS / "costs.md").read_text("utf-8")
