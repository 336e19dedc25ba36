"""The pages say what is there: every public name, every cost."""

import inspect
import pathlib
import re

import onebit_jax
from benchmarks.costs import tables

DOCS = pathlib.Path(__file__).parents[1] / "docs"


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
    public = [
        name
        for name, value in vars(onebit_jax).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    ]
    assert sorted(told) == sorted(public)


def test_the_costs_are_those_of_the_code():
    assert tables() in (DOCS / "costs.md").read_text("utf-8")
