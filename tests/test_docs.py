"""The pages say what is there: every public name, every cost."""

import pathlib
import re
import tomllib

import onebit_jax
from benchmarks.costs import tables

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_reference_has_every_public_name():
    told = [
        name
        for page in (DOCS / "api").glob("*.rst")
        for name in re.findall(
            r"^\.\. (?:auto)?(?:class|function|data):: (\w+)$",
            page.read_text("utf-8"),
            re.MULTILINE,
        )
    ]
    assert sorted(told) == sorted(onebit_jax.__all__)


def test_the_version_is_the_changelogs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    changelog = (DOCS / "changelog.md").read_text("utf-8")
    newest, rest = re.search(r"^## ([\d.]+)(.*)$", changelog, re.MULTILINE).groups()
    dev = ".dev0" if rest == ", unreleased" else ""
    assert project["version"] == newest + dev


def test_the_costs_are_those_of_the_code():
    assert tables() in (DOCS / "costs.md").read_text("utf-8")
