"""What a fine-tuning run's folder remembers of what was asked for."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from train.core import run_folder
from train.core.errors import InputError
from train.squad.config import SquadConfig, check_resumable, from_json, to_json

if TYPE_CHECKING:
    from pathlib import Path


_COMMAND = "train.squad"


class Remembered(NamedTuple):
    """A run, as its folder remembers it.

    Attributes:
      config: The flags that it was started with.
      contents: The name of its training file and vocabulary by their contents.
    """

    config: SquadConfig
    contents: str


def contents_name(*parts: bytes | str) -> str:
    """A name for the training file and the vocabulary by what is in them."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\n")
    return digest.hexdigest()


def remember(run: Remembered) -> None:
    """Writes what `read` reads.

    Args:
      run: The run, whose folder is its `out`.

    Raises:
      InputError: The folder cannot be written to.
    """
    values = {
        "command": _COMMAND,
        "flags": to_json(run.config),
        "contents": run.contents,
    }
    run_folder.write_values(run.config.out, values)


def read(folder: Path) -> Remembered:
    """Reads what `remember` wrote.

    Args:
      folder: The run's folder.

    Returns:
      The run.

    Raises:
      InputError: There is no run, or one of another command, or its file is damaged.
    """
    return run_folder.read_values(
        folder,
        _COMMAND,
        lambda values: Remembered(from_json(values["flags"]), values["contents"]),
    )


def check_own(run: Remembered) -> None:
    """Refuses to go on with another run's training.

    Args:
      run: The run that is asked for, whose folder is its `out`.

    Raises:
      InputError: There is no run in that folder, or another.
    """
    folder = run.config.out
    found = read(folder)
    check_resumable(found.config, run.config)
    if found.contents != run.contents:
        raise InputError(
            f"the training file or the vocabulary is not the one that the run in "
            f"{folder} was started with; restore it, or start a new run."
        )
