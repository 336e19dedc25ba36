"""Output of several processes, passed on line by line."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from typing import IO

_LONGEST = 400
"""Characters that are kept of a last line."""
_FRAME = "│ \t\r\n"
"""What stands around the words of a line, as in the boxes that tyro draws."""
_LAST_WORDS = 2.0
"""Seconds after a line `error: …`, which says why a process ends, in which threads
may still print their tracebacks."""


class Relay(threading.Thread):
    """A thread that passes on one stream of a process, line by line.

    Args:
      pipe: the stream.
      sink: the file that takes it.
      prefix: text before each line.

    Attributes:
      last_line: the last line with a letter, cut to a length that can be read; after
        a traceback the line of its exception, unless a line of an error follows, which
        what comes right after it does not replace.
      is_exception: whether that is the line of an exception.
      silent_since: when the last line came, by `time.monotonic`.
    """

    def __init__(self, pipe: IO[bytes], sink: IO[bytes], prefix: str):
        super().__init__(daemon=True)
        self.last_line, self.is_exception = "", False
        self.silent_since = time.monotonic()
        self._pipe, self._sink, self._prefix = pipe, sink, prefix
        self._in_traceback, self._told_at = False, -_LAST_WORDS
        self.start()

    def run(self) -> None:
        """Passes lines on until the stream ends."""
        # Bytes that are no text come out as they came in.
        code = ("utf-8", "surrogateescape")
        with io.TextIOWrapper(self._pipe, *code, newline="") as lines:
            for line in lines:
                self.silent_since = time.monotonic()
                self._note(line, line[:_LONGEST].strip(_FRAME))
                # A bar that is drawn again and again is for those who watch.
                if not line.endswith("\r") or self._sink.isatty():
                    end = "" if line.endswith(("\n", "\r")) else "\n"
                    self._write(f"{self._prefix}{line}{end}".encode(*code))

    def _note(self, line: str, words: str) -> None:
        if words.startswith("error: "):
            self._told_at = self.silent_since
            self._in_traceback = self.is_exception = False
            self.last_line = words
        elif self.silent_since - self._told_at <= _LAST_WORDS:
            return
        elif line.startswith("Traceback (most recent call last):"):
            self._in_traceback, self.is_exception = True, False
        elif self._in_traceback and not line.startswith(" "):
            self._in_traceback, self.is_exception = False, True
            self.last_line = words
        elif any(map(str.isalpha, words)) and not self.is_exception:
            self.last_line = words

    def _write(self, line: bytes) -> None:
        error = _write_or_drop(self._sink, line)
        # A broken pipe is of readers who have gone, as they know.
        if error is not None and not isinstance(error, BrokenPipeError):
            say(
                f"{self._sink.name} cannot be written to ({error.strerror}); the "
                "processes go on, and what it should have held from here on is lost."
            )


def say(text: str) -> None:
    """Prints a line of the launcher's own to standard error."""
    line = f"[launch] {text}\n".encode(errors="surrogateescape")
    _write_or_drop(sys.stderr.buffer, line)


def _write_or_drop(sink: IO[bytes], line: bytes) -> OSError | None:
    """Writes a line; if that fails, drops it and all that is written there later.

    A full disk, or a reader who has gone, must not end the training.
    """
    try:
        sink.write(line)
        sink.flush()
    except OSError as error:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sink.fileno())
        return error
    return None
