"""Text files, or Python's own reference documentation, as documents of sentences."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from train.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Document = tuple[str, ...]
"""A document is its sentences in order."""

DOCUMENT_CHARACTERS = 10_000
"""A longer text is cut into documents at paragraph ends, a longer paragraph at line
ends."""

# Not documentation of the language, or not part of every installation.
_SKIPPED = frozenset(
    {"idlelib", "lib2to3", "pydoc_data", "site-packages", "turtledemo"}
)
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[\"'(`]?[A-Z0-9])")
_RULER = re.compile(r"([^\w\s])\1{3,}")
_WORD = re.compile(r"[^\W\d_]{2}")


def read_corpus(paths: Sequence[Path]) -> list[Document]:
    """Reads documents, in an order that depends on nothing but the texts' paths.

    Args:
      paths: Text files, and folders whose files are all text; none for the reference
        documentation of the running Python.

    Returns:
      Documents that have a sentence at least.

    Raises:
      InputError: A path cannot be read, is not text, or there is no text at all.
    """
    texts = map(_read, _files(paths)) if paths else reference_documentation()
    documents = [document for text in texts for document in split_documents(text)]
    if not documents:
        given = ", ".join(map(str, paths))
        raise InputError(
            f"the corpus {given} holds no text; give files with sentences."
        )
    return documents


def reference_documentation() -> Iterator[str]:
    """Yields the language reference and every docstring of the standard library.

    The language reference is what `help()` shows on topics, a text a topic; docstrings
    are read from the sources without importing them, a text a module.
    """
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield _RULER.sub("", topics[name])
    library = Path(sysconfig.get_path("stdlib"))
    sources = (path.relative_to(library) for path in library.rglob("*.py"))
    for source in sorted(sources, key=lambda path: path.as_posix()):
        if not _is_test(source) and not _SKIPPED.intersection(source.parts):
            text = "\n\n".join(_docstrings((library / source).read_bytes()))
            yield _RULER.sub("", text)


def split_documents(text: str) -> Iterator[Document]:
    r"""Cuts a text into documents of whole paragraphs.

    Args:
      text: Paragraphs separated by blank lines. A stretch without blank lines that is
        longer than a document is taken for paragraphs of about a document, whole
        lines each.

    Yields:
      Documents of about `DOCUMENT_CHARACTERS`, as sentences without line breaks.

    Example:
      >>> from train.corpus import split_documents
      >>> list(split_documents("One is one. Two\nis two.\n\n***\n\nThree."))
      [('One is one.', 'Two is two.', 'Three.')]
    """
    sentences: list[str] = []
    characters = 0
    for paragraph in _paragraphs(text):
        if characters >= DOCUMENT_CHARACTERS:
            yield tuple(sentences)
            sentences, characters = [], 0
        line = " ".join(paragraph.split())
        characters += len(line)
        sentences += [s for s in _SENTENCE.split(line) if _WORD.search(s)]
    if sentences:
        yield tuple(sentences)


def _paragraphs(text: str) -> Iterator[str]:
    for stretch in _PARAGRAPH.split(text):
        if len(stretch) <= DOCUMENT_CHARACTERS:
            yield stretch
        else:
            yield from _join_lines(stretch)


def _join_lines(stretch: str) -> Iterator[str]:
    """Whole lines, joined until they are as long as a document."""
    lines: list[str] = []
    characters = 0
    for line in stretch.split("\n"):
        lines.append(line)
        characters += len(line)
        if characters >= DOCUMENT_CHARACTERS:
            yield "\n".join(lines)
            lines, characters = [], 0
    if lines:
        yield "\n".join(lines)


def fingerprint(documents: Iterable[Document]) -> str:
    """Names a corpus by its contents: a SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update("\n".join(document).encode() + b"\0")
    return digest.hexdigest()


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(
                file
                for file in path.rglob("*")
                if file.is_file()
                and not any(p.startswith(".") for p in file.relative_to(path).parts)
            )
        else:
            yield path


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(
            f"the corpus {path} cannot be read ({error.strerror}); give the path of a "
            "text file or of a folder of text files."
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"the corpus file {path} is not UTF-8 text; convert it or leave it out."
        ) from error
    if "\0" in text:
        raise InputError(f"the corpus file {path} is binary, not text; leave it out.")
    return text


def _is_test(source: Path) -> bool:
    return any(part in ("test", "tests", "idle_test") for part in source.parts)


def _docstrings(source: bytes) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Module()
                | ast.ClassDef()
                | ast.FunctionDef()
                | ast.AsyncFunctionDef()
            ) if docstring := ast.get_docstring(node):
                yield docstring
