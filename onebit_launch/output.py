"""Output of several processes, line by line under their numbers, or in files."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from typing import IO, TYPE_CHECKING

from onebit_launch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_LONGEST = 400
"""Characters that are kept of a last line."""


@contextlib.contextmanager
def open_sinks(
    numbers: Sequence[int], log_dir: Path | None, *, append: bool
) -> Iterator[list[list[IO[bytes]]]]:
    """Files that take the output of processes.

    Args:
      numbers: Their numbers.
      log_dir: Folder for a file for each, `0.log` and so on; None for this process's
        own standard output and error.
      append: True to go on in files that are there.

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
            files = [path.open("ab" if append else "wb") for path in paths]
        except OSError as error:
            raise UsageError(
                f"--log-dir {log_dir} cannot be written to ({error.strerror}); give "
                "another."
            ) from error
        yield [[stack.enter_context(file)] for file in files]


class Relay(threading.Thread):
    """A thread that passes on one stream of a process, line by line.

    Args:
      pipe: The stream.
      sink: The file that takes it.
      prefix: Text before each line.

    Attributes:
      last_line: The last line that was not empty, cut to a length that can be read.
    """

    def __init__(self, pipe: IO[bytes], sink: IO[bytes], prefix: str):
        super().__init__(daemon=True)
        self.last_line = ""
        self._pipe, self._sink, self._prefix = pipe, sink, prefix
        self.start()

    def run(self) -> None:
        """Passes lines on until the stream ends."""
        # Bytes that are no text come out as they came in.
        code = ("utf-8", "surrogateescape")
        with io.TextIOWrapper(self._pipe, *code, newline="") as lines:
            for line in lines:
                self.last_line = line[:_LONGEST].strip() or self.last_line
                # A bar that is drawn again and again is for those who watch.
                if not line.endswith("\r") or self._sink.isatty():
                    end = "" if line.endswith(("\n", "\r")) else "\n"
                    self._write(f"{self._prefix}{line}{end}".encode(*code))

    def _write(self, line: bytes) -> None:
        try:
            self._sink.write(line)
            self._sink.flush()
        except BrokenPipeError:
            # Those who read along have gone; the training has not.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._sink.fileno())
