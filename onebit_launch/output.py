"""Output of several processes, line by line under their numbers, or in files."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from typing import IO, TYPE_CHECKING

from onebit_launch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_LONGEST = 400
"""Characters that are kept of a last line."""
_FRAME = "│ \t\r\n"
"""What stands around the words of a line, as in the boxes that tyro draws."""
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = "error: "
"""How a line begins that says in a sentence why a process ends."""
_LAST_WORDS = 2.0
"""Seconds after such a line in which other threads may still print their tracebacks."""


@contextlib.contextmanager
def open_sinks(
    numbers: Sequence[int], log_dir: Path | None
) -> Iterator[list[list[IO[bytes]]]]:
    """Files that take the output of processes.

    Args:
      numbers: their numbers.
      log_dir: folder for a file for each, `0.log` and so on, which goes on where it is
        there; None for this process's own standard output and error.

    Yields:
      The files of each process: one for all its output, or two.

    Raises:
      UsageError: They cannot be made.
    """
    with contextlib.ExitStack() as stack:
        if log_dir is None:
            yield [[sys.stdout.buffer, sys.stderr.buffer]] * len(numbers)
            return
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            paths = [log_dir / f"{number}.log" for number in numbers]
            files = [path.open("ab") for path in paths]
        except OSError as error:
            raise UsageError(
                f"--log-dir {log_dir} cannot be written to ({error.strerror}); give "
                "another."
            ) from error
        yield [[stack.enter_context(file)] for file in files]


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
        self.start()

    def run(self) -> None:
        """Passes lines on until the stream ends."""
        # Bytes that are no text come out as they came in.
        code = ("utf-8", "surrogateescape")
        with io.TextIOWrapper(self._pipe, *code, newline="") as lines:
            in_traceback, told_at = False, -_LAST_WORDS
            for line in lines:
                words = line[:_LONGEST].strip(_FRAME)
                self.silent_since = time.monotonic()
                if words.startswith(_ERROR):
                    in_traceback = self.is_exception = False
                    self.last_line, told_at = words, self.silent_since
                elif self.silent_since - told_at > _LAST_WORDS:
                    in_traceback = self._follow(line, words, in_traceback)
                # A bar that is drawn again and again is for those who watch.
                if not line.endswith("\r") or self._sink.isatty():
                    end = "" if line.endswith(("\n", "\r")) else "\n"
                    self._write(f"{self._prefix}{line}{end}".encode(*code))

    def _follow(self, line: str, words: str, in_traceback: bool) -> bool:
        """Notes a line that is none of an error.

        Returns:
          Whether a traceback goes on after it.
        """
        if line.startswith(_TRACEBACK):
            in_traceback, self.is_exception = True, False
        if any(map(str.isalpha, words)) and not self.is_exception:
            self.last_line = words
        if in_traceback and not line.startswith((" ", _TRACEBACK)):
            self.is_exception = True
            return False
        return in_traceback

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

    Args:
      sink: the file.
      line: the line.

    Returns:
      Why it failed; None if it did not, or had failed before.
    """
    try:
        sink.write(line)
        sink.flush()
    except OSError as error:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sink.fileno())
        return error
    return None
