"""A planted bug."""

from typing import NamedTuple


class Bug(NamedTuple):
    """A planted bug: in one file one text for another, and the tests to find it."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
