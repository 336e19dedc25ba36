"""The pages say what is there: every public name, every cost."""

import operator
import pathlib
import re
import tomllib

import jax
import optax

import onebit_jax
from benchmarks.costs import tables
from benchmarks.run_bytes import lines

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
    found = re.findall(r"`(\w+\([^`]*\brate\b[^`]*\))`", page)
    known = vars(onebit_jax) | {"optax": optax, "rate": 1e-3, "b1": 0.9}
    known |= {"n": 10, "steps": 1000}
    assert len(found) >= 6
    for line in found:
        assert eval(line, known), line


def test_the_version_is_the_changelogs_and_the_citations():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    changelog = (DOCS / "changelog.md").read_text("utf-8")
    newest, rest = re.search(r"^## ([\d.]+)(.*)$", changelog, re.MULTILINE).groups()
    dev = ".dev0" if rest == ", unreleased" else ""
    assert project["version"] == newest + dev
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {newest}{dev}\n" in citation


def test_the_costs_are_those_of_the_code():
    assert tables() in (DOCS / "costs.md").read_text("utf-8")


def test_the_bytes_of_a_run_in_the_picture_are_those_of_the_code():
    """Those of its alt text, too."""
    picture = (DOCS / "run-bytes.svg").read_text("utf-8")
    # Optax's own arithmetic mixes integers and floats.
    with jax.numpy_dtype_promotion("standard"):
        assert all(f">{words}<" in picture for words in lines())
    (alt,) = re.findall(
        r"!\[(.*)\]\(run-bytes.svg\)", (DOCS / "costs.md").read_text("utf-8")
    )
    shown = re.findall(r"([\d.]+) GB", picture)
    assert len(shown) == 5
    assert re.findall(r"\d+\.\d+", alt) == shown
