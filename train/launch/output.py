"""What several processes print, line by line under their numbers, or in files."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import sys
import textwrap
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TextIO

from train.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

_STOP = re.compile(rb"([\r\n])")
_FATAL = re.compile(r"F\d{4} [\d:.]+ +\d+ \S+\] ")
# Of the end that JAX's client makes of its process.
_LOSS = re.compile(r"^F\d{4} .*(coordination|service|UNAVAILABLE|DEADLINE_EXCEEDED)")
_LAST_BYTES = 1 << 16
_TAIL = 60
"""Lines of standard error that are kept for what they say at an end."""


class Output:
    """The output of processes, relayed to the launcher's own or kept in files.

    Args:
      folder: Folder for a file for each process, `0.log` and so on; None to relay.
      append: Whether to go on in files that are there.
    """

    def __init__(self, folder: Path | None, *, append: bool = False):
        self._folder = folder
        self._mode = "ab" if append else "wb"
        self._pipes = selectors.DefaultSelector()
        self._tails: dict[int, deque[bytes]] = {}
        self._starts: dict[int, int] = {}

    def __enter__(self) -> Self:
        """Makes the folder.

        Raises:
          InputError: It cannot be made.
        """
        if self._folder:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"--log-dir {self._folder} cannot be made ({error.strerror}); give "
                    "another folder."
                ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes what is still open."""
        for key in list(self._pipes.get_map().values()):
            self._close(key)
        self._pipes.close()

    @contextlib.contextmanager
    def targets(self, process: int):
        """Where a process that is about to start is to write.

        Args:
          process: Its number.

        Yields:
          Its standard output and error, as `subprocess.Popen` takes them.
        """
        if self._folder is None:
            yield subprocess.PIPE, subprocess.PIPE
        else:
            with self._path(process).open(self._mode) as file:
                self._starts[process] = file.seek(0, os.SEEK_END)
                yield file, subprocess.STDOUT

    def relay(self, process: int, started: subprocess.Popen[bytes]) -> None:
        """Takes over the pipes of a process that has been started."""
        for pipe, sink in (
            (started.stdout, sys.stdout),
            (started.stderr, sys.stderr),
        ):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                stream = _Stream(process, sink, is_error=sink is sys.stderr)
                self._pipes.register(pipe, selectors.EVENT_READ, stream)

    def pump(self, seconds: float) -> None:
        """Passes on what comes, for a time.

        Args:
          seconds: The time; 0 for what the pipes hold already.
        """
        end = time.monotonic() + seconds
        left = seconds
        while self._pipes.get_map():
            for key, _ in self._pipes.select(left):
                self._pass_on(key)
            # Not until nothing comes any more: a process may never stop printing.
            left = end - time.monotonic()
            if left <= 0:
                return
        time.sleep(max(0.0, left))

    def cause(self, process: int) -> str:
        """What the end of a process's standard error says of why it ended."""
        return cause_in(self._last_lines(process))

    def tells_of_loss(self, process: int) -> bool:
        """Whether JAX ended a process because another was lost."""
        return any(map(_LOSS.search, self._last_lines(process)))

    def _last_lines(self, process: int) -> list[str]:
        if self._folder:
            with self._path(process).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                # What an earlier attempt said is not of this one.
                file.seek(max(self._starts[process], size - _LAST_BYTES))
                lines = file.read().splitlines()[-_TAIL:]
        else:
            lines = self._tails.get(process, ())
        return [line.decode(errors="replace") for line in lines]

    def _pass_on(self, key: selectors.SelectorKey) -> None:
        # As much as a pipe holds.
        data = os.read(key.fd, 1 << 16)
        if data:
            self._keep(key.data, key.data.feed(data))
        else:
            self._close(key)

    def _close(self, key: selectors.SelectorKey) -> None:
        self._pipes.unregister(key.fileobj)
        self._keep(key.data, key.data.end())
        pipe: Any = key.fileobj
        pipe.close()

    def _keep(self, stream: _Stream, lines: Sequence[bytes]) -> None:
        if stream.is_error:
            tail = self._tails.setdefault(stream.process, deque(maxlen=_TAIL))
            tail.extend(lines)

    def _path(self, process: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{process}.log"


def cause_in(lines: Sequence[str]) -> str:
    """The line that says why a process ended.

    Args:
      lines: The last of its standard error.

    Returns:
      What a fatal error of XLA's says, without the stack under it; else the last line
      that is not empty.

    Example:
      >>> from train.launch.output import cause_in
      >>> cause_in(["Traceback (most recent call last):", "KeyError: 'a'", ""])
      "KeyError: 'a'"
    """
    fatal = [i for i, line in enumerate(lines) if _FATAL.match(line)]
    if fatal:
        text = " ".join(lines[fatal[-1] :]).partition(" *** Check failure")[0]
        text = (
            _FATAL.sub("", text).rpartition("absl::Status: ")[2].partition(" RPC: ")[0]
        )
    else:
        text = next((line for line in reversed(lines) if line.strip()), "")
    return textwrap.shorten(text, 400, placeholder=" …")


class _Stream:
    """One pipe of a process, cut into lines."""

    def __init__(self, process: int, sink: TextIO, *, is_error: bool):
        self.process = process
        self.is_error = is_error
        self._sink = sink
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Prints whole lines and returns them."""
        parts, lines = _STOP.split(data), []
        for text, stop in zip(parts[:-1:2], parts[1::2], strict=True):
            line = b"".join([*self._rest, text])
            self._rest = []
            # A bar that is drawn again and again is for those who watch.
            if stop == b"\n" or (line and self._sink.isatty()):
                self._print(line, stop)
            if stop == b"\n":
                lines.append(line)
        self._rest += filter(None, parts[-1:])
        return lines

    def end(self) -> list[bytes]:
        """Prints what is left."""
        return self.feed(b"\n") if self._rest else []

    def _print(self, line: bytes, stop: bytes) -> None:
        erase = b"\x1b[K" if self._sink.isatty() else b""
        try:
            self._sink.flush()
            out = self._sink.buffer
            out.write(b"[%d] " % self.process + line + erase + stop)
            out.flush()
        except BrokenPipeError:
            # Who read along has gone; the training has not.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._sink.fileno())
