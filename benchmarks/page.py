"""Pages that a benchmark writes a part of."""

from __future__ import annotations


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
