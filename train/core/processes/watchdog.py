"""A limit on the time that a process waits for the others."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from onebit_launch.errors import LOST_EXIT

if TYPE_CHECKING:
    from typing import Self

ADVICE = (
    "another process hangs or a link is down; start again, a training with --resume, "
    "or give a longer --timeout"
)


class Watchdog:
    """Ends the process when what it expects does not happen in time.

    A collective that waits for a lost worker cannot be interrupted, so a thread
    beside it ends the process, hard. It counts the time it runs itself: a process
    that is stopped for a while does not end for that.

    Args:
      seconds: How long what is expected may take.
      advice: What to do when it has taken longer.

    Attributes:
      expected: What is waited for; empty while nothing is.

    Example:
      >>> from train.core.processes.watchdog import Watchdog
      >>> with Watchdog(60) as watchdog:
      ...     watchdog.expect("step 1")
    """

    expected: str

    def __init__(self, seconds: float, advice: str = ADVICE):
        self.expected = ""
        self._seconds, self._advice = seconds, advice
        self._changes = 0
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        """Starts to watch."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Watches no longer."""
        self._closed.set()

    def expect(self, what: str) -> None:
        """Names what is to end next; nothing, by an empty string, may take any time."""
        self.expected = what
        self._changes += 1

    def _watch(self) -> None:
        interval = min(1.0, self._seconds / 20)
        waited, seen = 0.0, self._changes
        while not self._closed.wait(interval):
            waited = waited + interval if seen == self._changes else 0.0
            seen = self._changes
            if self.expected and waited >= self._seconds:
                sys.stderr.write(
                    f"\nerror: {self.expected} did not end within {self._seconds:g} s: "
                    f"{self._advice}.\n"
                )
                sys.stderr.flush()
                os._exit(LOST_EXIT)
