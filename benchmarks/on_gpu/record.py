"""The JSON of a part, and the time that is left to it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


class OutOfTimeError(Exception):
    """The share of a part is over."""


class Record:
    """The results of a part, written the moment that they are known.

    Args:
      file: The JSON.
      seconds: The share of the part.

    Attributes:
      values: All that was found.
    """

    def __init__(self, file: Path, seconds: float):
        self.file = file
        self.values: dict[str, Any] = {}
        self._end = time.monotonic() + seconds

    def write(self, **values: Any) -> None:
        """Adds values."""
        self.values |= values
        write(self.file, self.values)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def check(self) -> None:
        """Stops the part where its share is over.

        Raises:
          OutOfTimeError: It is.
        """
        if self.left <= 0:
            raise OutOfTimeError


def write(file: Path, values: dict[str, Any]) -> None:
    """Writes a JSON, whole or not at all."""
    new = file.with_suffix(".new")
    text = json.dumps(values, indent=1, ensure_ascii=False)
    new.write_text(text + "\n", encoding="utf-8")
    new.replace(file)


def read(folder: Path, part: str) -> dict[str, Any]:
    """The results of a part; none where it has not run.

    Args:
      folder: That of the run.
      part: Its name.

    Returns:
      The values.
    """
    file = folder / f"{part}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
