"""Text files, or Python's own reference documentation, as documents of sentences."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import itertools
import os
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from train.core.errors import InputError

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
    | {"test", "tests", "idle_test"}
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[\"'(`]?[A-Z0-9])")
_RULER = re.compile(r"([^\w\s])\1{3,}")
_WORD = re.compile(r"[^\W\d_]{2}")


def read_corpus(paths: Sequence[Path]) -> Iterator[Document]:
    """Reads documents, in an order that depends on nothing but the texts' paths.

    The paths are of text files, and of folders whose files are all text; without any it
    is the reference documentation of the running Python. Documents are read as they are
    asked for.

    Raises:
      InputError: A path cannot be read, is not text, or there is no text at all.
    """
    if paths:
        texts = map(_read_lines, _files(paths))
    else:
        texts = (text.split("\n") for text in reference_documentation())
    is_empty = True
    for lines in texts:
        for document in split_documents(lines):
            is_empty = False
            yield document
    if is_empty:
        given = ", ".join(map(str, paths))
        raise InputError(
            f"the corpus {given} holds no text; give files with sentences."
        )


def check_outside(paths: Sequence[Path], **folders: Path | None) -> None:
    """Refuses to write, by a flag, into a folder whose files are all read as text."""
    written = {flag: folder for flag, folder in folders.items() if folder}
    for (flag, folder), corpus in itertools.product(written.items(), paths):
        inside, around = folder.resolve(), corpus.resolve()
        if not inside.is_relative_to(around):
            continue
        if not any(part[0] == "." for part in inside.relative_to(around).parts):
            raise InputError(
                f"--{flag} {folder} lies in the corpus {corpus}, whose files are "
                f"all read as text; give --{flag} elsewhere."
            )


@functools.cache
def reference_documentation() -> tuple[str, ...]:
    """The language reference and every docstring of the standard library.

    The language reference is what `help()` shows on topics, a text a topic; docstrings
    are read from the sources without importing them, a text a module.
    """
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    library = Path(sysconfig.get_path("stdlib"))
    sources = (path.relative_to(library) for path in library.rglob("*.py"))
    texts += [
        "\n\n".join(_docstrings((library / source).read_bytes()))
        for source in sorted(sources, key=lambda path: path.as_posix())
        if not _SKIPPED.intersection(source.parts)
    ]
    return tuple(_RULER.sub("", text) for text in texts)


def split_documents(lines: Iterable[str]) -> Iterator[Document]:
    """Cuts a text into documents of whole paragraphs.

    Args:
      lines: Lines of paragraphs, which blank lines separate. A stretch without blank
        lines that is longer than a document is taken for paragraphs of about a
        document, whole lines each.

    Yields:
      Documents of about `DOCUMENT_CHARACTERS`, as sentences without line breaks.

    Example:
      >>> from train.data.corpus import split_documents
      >>> list(split_documents(["One is one. Two", "is two.", "", "***", "", "Three."]))
      [('One is one.', 'Two is two.', 'Three.')]
    """
    sentences: list[str] = []
    characters = 0
    for paragraph in _paragraphs(lines):
        if characters >= DOCUMENT_CHARACTERS:
            if sentences:  # none in a table of numbers
                yield tuple(sentences)
            sentences, characters = [], 0
        line = " ".join(paragraph.split())
        characters += len(line)
        sentences += [s for s in _SENTENCE.split(line) if _WORD.search(s)]
    if sentences:
        yield tuple(sentences)


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Lines up to a blank one, or to as many characters as a document has."""
    paragraph: list[str] = []
    characters = 0
    for line in lines:
        is_blank = not line.strip()
        if paragraph and (is_blank or characters >= DOCUMENT_CHARACTERS):
            yield "\n".join(paragraph)
            paragraph, characters = [], 0
        if not is_blank:
            paragraph.append(line)
            characters += len(line)
    if paragraph:
        yield "\n".join(paragraph)


class Survey(NamedTuple):
    """A corpus's name by its contents, a SHA-256 in hexadecimal, and its documents."""

    fingerprint: str
    documents: int


def survey(documents: Iterable[Document]) -> Survey:
    """Reads a corpus through."""
    digest = hashlib.sha256()
    count = 0
    for document in documents:
        digest.update("\n".join(document).encode() + b"\0")
        count += 1
    return Survey(digest.hexdigest(), count)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for path in paths:
        with _readable(path):
            files = sorted(_in_folder(path)) if path.is_dir() else [path]
        for file in files:
            if (own := file.resolve()) in seen:
                raise InputError(
                    f"the corpus has {file} twice; leave one out, or what is held out "
                    "would be trained on, too."
                )
            seen.add(own)
            yield file


def _in_folder(path: Path) -> Iterator[Path]:
    """All files but hidden ones; a link to nothing too, which cannot be read."""
    for folder, folders, names in os.walk(path, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if (link := Path(folder, name)).is_symlink():  # which could lead in a ring
                raise InputError(
                    f"the corpus has {link}, a link to a folder, and such are not "
                    "followed; give that folder as one more path after --corpus, and "
                    "remove the link."
                )
        files = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (file for file in files if file.is_file() or not file.exists())


def _raise(error: OSError) -> NoReturn:
    raise error


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"the corpus {error.filename or path} cannot be read ({error.strerror}); "
            "give the path of a text file or of a folder of text files."
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"the corpus file {path} is not UTF-8 text; convert it or leave it out."
        ) from error


def _read_lines(path: Path) -> Iterator[str]:
    with _readable(path), path.open(encoding="utf-8-sig") as file:
        for line in file:
            if "\0" in line:
                raise InputError(
                    f"the corpus file {path} is binary, not text; leave it out."
                )
            yield line.removesuffix("\n")


def _docstrings(source: bytes) -> Iterator[str]:
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            yield docstring
