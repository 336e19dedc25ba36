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


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, then what it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, for a sentence to go on after."""
    return str(error).partition("\n")[0].rstrip(".:")


def is_out_of_memory(error: BaseException) -> bool:
    """True where a device, or this machine, had too little memory."""
    return any(
        isinstance(cause, MemoryError) or "RESOURCE_EXHAUSTED" in str(cause)
        for cause in causes(error)
    )


@contextlib.contextmanager
def writable(path: Path, flag: str = "--out") -> Iterator[None]:
    """Says in one sentence that what a flag names cannot be made or written to."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{flag} {path} cannot be written to ({error.strerror}); mend that, or "
            "give another."
        ) from error
