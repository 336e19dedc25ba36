"""The pages for users are read once: short sentences, short rows, short pages."""

import inspect
from itertools import chain

import prose
import pytest

import onebit_jax

PAGES = prose.pages()
NAMES = ["README.md", *chain(*PAGES.values())]
SHORT = "A sentence may have as many as thirty words, " + "and more " * 10 + "no."


def found(text):
    return [what for _, what in prose.findings(text)]


@pytest.mark.parametrize("page", NAMES)
def test_a_page_is_read_once(page):
    told = prose.faults(page, prose.read(page), page in PAGES["How-to"])
    assert not told, "\n".join(told)


@pytest.mark.parametrize("name", onebit_jax.__all__)
def test_a_docstring_is_read_once(name):
    told = list(prose.docstring_findings(inspect.getdoc(getattr(onebit_jax, name))))
    assert not told, "\n".join(told)


def test_every_kind_has_pages():
    assert all(len(pages) > 2 for pages in PAGES.values())
    assert "docs/using.md" in PAGES["How-to"]


@pytest.mark.parametrize(
    "text",
    [
        SHORT,
        f"{SHORT} {SHORT}",
        f"- {SHORT}\n- {SHORT}",
        f"{SHORT[:-1]}? {SHORT[:-1]}! ({SHORT}) {SHORT}",
        f"{SHORT} `code` comes next, 1.5 times. {SHORT}",
        f"{SHORT[:-3]}`a code span; of any; length; is one word`.",
        f"{SHORT[:-3]}[no](https://example.org/a/b?c=d).",
        f"{SHORT[:-3]}$m = \\beta_1 m + (1 - \\beta_1) g_i$.",
        f"```sh\n{SHORT[:-1]} {SHORT}\n```",
        f"    {SHORT[:-1]} {SHORT}",
        f"<!-- {SHORT[:-1]} {SHORT} -->",
        f"<div>\n{SHORT[:-1]} {SHORT}\n</div>",
        "| a | b |\n|---|---|\n|" + " a" * 12 + " |" + " `b c d`" * 8 + " |",
        "One; two.",
    ],
)
def test_what_is_short_enough(text):
    assert found(text) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (SHORT[:-1] + " more.", "31 words"),
        (SHORT[:-3] + "i.e. no more.", "32 words"),
        (SHORT[:-3] + "e.g. Adam.", "31 words"),
        (SHORT[:-3] + "1.5 times.", "31 words"),
        (SHORT[:-3] + "J. Doe.", "31 words"),
        (SHORT[:-3] + "etc. too.", "31 words"),
        (SHORT[:-3] + "two\nwords.", "31 words"),
        (f"> {SHORT[:-1]} more.", "31 words"),
        (f"- a\n  - {SHORT[:-1]} more.", "31 words"),
        (SHORT[:-3] + "[two words](a.md).", "31 words"),
        (SHORT[:-3] + "`two` `codes`.", "31 words"),
        ("| a | b |\n|---|---|\n|" + " a" * 12 + " |" + " `b c`" * 9 + " |", "of 21"),
        ("One; two; three.", "semicolons"),
    ],
)
def test_what_is_too_long(text, what):
    (told,) = found(text)
    assert what in told


def test_a_finding_has_its_line():
    assert [line for line, _ in prose.findings(f"# A\n\nNo.\n{SHORT[:-1]} more.")] == [
        4
    ]


LONG = SHORT[:-1] + " more."


@pytest.mark.parametrize(
    ("docstring", "count"),
    [
        (f"{LONG}\n\n{LONG}", 2),
        (f"{SHORT}\n\nArgs:\n  a: {SHORT[11:]}\n  b: {SHORT[11:]}", 0),
        (f"Args:\n  a: {LONG}\n    {SHORT}\n\nRaises:\n  ValueError: {LONG}", 2),
        (f"Returns:\n  {LONG}", 1),
        (f"{SHORT[:-3]}:math:`a + b c`.", 0),
        (f"{SHORT}\n\n.. math::\n  {LONG}\n\nExample:\n  >>> {LONG}", 0),
        (f"References:\n  {LONG}", 0),
        ("One; two; three.", 1),
    ],
)
def test_what_is_too_long_in_a_docstring(docstring, count):
    assert len(list(prose.docstring_findings(docstring))) == count


def test_a_how_to_page_is_short():
    assert prose.faults("page.md", "No.\n" * 80, how_to=True) == []
    assert prose.faults("page.md", "No.\n" * 81, how_to=False) == []
    assert prose.faults("page.md", "No.\n" * 81, how_to=True) == [
        "page.md: 81 lines, where a how-to page has 80"
    ]
