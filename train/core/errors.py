"""Errors that a user can put right, and the loss of another process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class InputError(ValueError):
    """Something given cannot be used; the message says what to do about it."""


class LostError(RuntimeError):
    """Another process is lost, and this one cannot go on without it."""


@contextlib.contextmanager
def writable(path: Path, flag: str = "--out") -> Iterator[None]:
    """Says in one sentence that a file or folder cannot be made or written to.

    Args:
      path: What is written, or written to inside.
      flag: What names it on the command line.

    Raises:
      InputError: It cannot be.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{flag} {path} cannot be written to ({error.strerror}); give another."
        ) from error
