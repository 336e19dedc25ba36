"""Markdown: tables, and the part of a page that a benchmark writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    Args:
      heads: Names of the columns.
      rows: Cells, as many in each row, of one line; a | in them is text.

    Returns:
      Its lines.

    Example:
      >>> from benchmarks.page import table
      >>> print(table(["a", "b"], [["1", "2"]]))
      | a | b |
      |---|---|
      | 1 | 2 |
    """
    escaped = ([cell.replace("|", r"\|") for cell in cells] for cells in (heads, *rows))
    lines = [f"| {' | '.join(cells)} |" for cells in escaped]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def fill(page: str, name: str, text: str) -> str:
    """Puts text between two marks of a page.

    Args:
      page: Text with the lines `<!-- name -->` and `<!-- end of name -->`.
      name: Name of the part.
      text: The new text between them.

    Returns:
      The new page.

    Raises:
      SystemExit: It has no such marks.
    """
    marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, start, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (start and end):
        raise SystemExit(f"The page must have the lines {' and '.join(marks)}.")
    return f"{before}{start}\n\n{text}\n\n{end}{after}"
