"""Sentences, table rows and pages that are too long for a tired reader.

    python tests/prose.py [PAGE ...]

names those of the README, the tutorials and the how-to pages, or of the given pages.
"""

import pathlib
import re
import sys
from math import inf

from markdown_it import MarkdownIt

ROOT = pathlib.Path(__file__).parents[1]
KINDS = "Tutorials", "How-to"
SENTENCE_WORDS = 30
ROW_WORDS = 20
HOW_TO_LINES = 80

PARSER = MarkdownIt("commonmark").enable("table")
MATHS = re.compile(r"\$\$.+?\$\$|\$[^$\n]+\$", re.DOTALL)
CODE = re.compile(r"`[^`]*`")
ROLE = re.compile(r":math:`[^`]*`")
HEADING = re.compile(r"(Args|Attributes|Returns|Raises|Warns|Example|References):")
ENTRIES = {"Args", "Attributes", "Raises", "Warns"}
UNREAD = {"Example", "References"}
# A period, question or exclamation mark, what it closes, and a space.
END = re.compile(r"[.?!]+[)\]\"']*\s+")
# Never the last word of a sentence, and the last where a capital follows.
LEADING = {"e.g.", "i.e.", "cf.", "vs.", "resp.", "approx.", "Fig.", "Eq.", "Sec."}
TRAILING = {"etc.", "al."}


def plain(inline):
    """The text that a reader sees, whose code, formulas and pictures are one word."""
    codes, parts = [], []
    for token in inline.children or ():
        if token.type == "code_inline":
            parts.append("\ue000")
            codes.append("`" + re.sub(r"[\s`]+", "␣", token.content) + "`")
        elif token.type == "image":
            parts.append("`picture`")
        elif token.type in ("softbreak", "hardbreak"):
            parts.append("\n")
        elif token.type.startswith("text"):
            parts.append(token.content)
    text = MATHS.sub("`formula`", "".join(parts))
    return re.sub("\ue000", lambda _: codes.pop(0), text)


def words(text):
    """The words of a plain text: what holds a letter or a digit, or is code."""
    return [word for word in text.split() if any(c.isalnum() or c == "`" for c in word)]


def sentences(text):
    """The sentences of a plain text, each with the number of its line from 0."""
    begin = 0
    for end in END.finditer(text):
        last = text[begin : end.end()].split()[-1].lstrip("([\"'")
        follows = text[end.end() : end.end() + 1]
        if last in LEADING or (last in TRAILING and not follows.isupper()):
            continue
        if re.fullmatch(r"[A-Z]\.", last):  # an initial of a name
            continue
        yield text.count("\n", 0, begin), text[begin : end.end()].strip()
        begin = end.end()
    if text[begin:].strip():
        yield text.count("\n", 0, begin), text[begin:].strip()


def findings(text):
    """Faults of a page's text, each with its line."""
    row, in_row, line = [], False, 0
    for token in PARSER.parse(text):
        if token.map:
            line = token.map[0] + 1
        if token.type == "tr_open":
            row, in_row = [], True
        elif token.type == "tr_close":
            if len(row) > ROW_WORDS:
                yield line, f"a row of {len(row)} words: {' '.join(row[:6])} …"
            in_row = False
        elif token.type == "inline":
            shown = plain(token)
            if in_row:
                row += words(shown)
            for below, what in long_sentences(shown, inf if in_row else SENTENCE_WORDS):
                yield line + below, what


def long_sentences(text, most=SENTENCE_WORDS):
    """Sentences of a plain text of more words, or of many parts, each with its line."""
    for line, sentence in sentences(text):
        count, begin = len(words(sentence)), " ".join(sentence.split()[:6])
        if count > most:
            yield line, f"a sentence of {count} words: {begin} …"
        if CODE.sub("", sentence).count(";") > 1:
            yield line, f"a chain of semicolons: {begin} …"


def paragraphs(docstring):
    """The prose of a docstring: neither its formulas, nor its example, nor its sources.

    An entry of its arguments, attributes or exceptions is a paragraph of its own.
    """
    section, paragraph = "", []
    for line in [*docstring.splitlines(), ""]:
        heading = HEADING.fullmatch(line)
        entry = section in ENTRIES and re.match(r"  \S", line)
        if heading or entry or not line.strip():
            shown, paragraph = " ".join(paragraph), []
            if shown and section not in UNREAD and not shown.startswith(".."):
                yield shown
        if heading:
            section = heading[1]
        elif line.strip():
            paragraph.append(line.strip())


def docstring_findings(docstring):
    """Faults of a docstring."""
    for paragraph in paragraphs(docstring):
        shown = ROLE.sub("`formula`", paragraph)
        shown = CODE.sub(lambda code: re.sub(r"\s+", "␣", code[0]), shown)
        yield from (what for _, what in long_sentences(shown))


def pages():
    """The pages of each kind, whose captions in the site's navigation begin with it."""
    found = {kind: [] for kind in KINDS}
    trees = r"^```{toctree}\n(.*?)^```"
    for tree in re.findall(trees, read("docs/index.md"), re.M | re.S):
        options, _, entries = tree.partition("\n\n")
        caption = re.search(r"^:caption: (.*)$", options, re.M)
        kind = caption and caption[1].partition(":")[0]
        if kind in found:
            names = re.findall(r"^(?:.*<)?([^<>\n]+)>?$", entries, re.M)
            found[kind] += [f"docs/{name}.md" for name in names]
    return found


def read(page):
    """The text of a page, named from the root."""
    return (ROOT / page).read_text("utf-8")


def faults(page, text, how_to):
    """Faults of a page, a line each."""
    told = [f"{page}:{line}: {what}" for line, what in findings(text)]
    lines = len(text.splitlines())
    if how_to and lines > HOW_TO_LINES:
        told.append(f"{page}: {lines} lines, where a how-to page has {HOW_TO_LINES}")
    return told


def main(named):
    """Prints what is wrong with the named pages, and says whether anything is."""
    found = pages()
    named = named or ["README.md", *found["Tutorials"], *found["How-to"]]
    told = [
        fault
        for page in named
        for fault in faults(page, read(page), page in found["How-to"])
    ]
    print(*told, sep="\n")
    return bool(told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
