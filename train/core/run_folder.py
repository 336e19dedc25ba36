"""A run's folder: what was asked for, and how far it is to go."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from train.bert.config import PretrainConfig, from_json, to_json, train_the_same
from train.core import checkpoint
from train.core import metrics_log as record
from train.core.errors import InputError, writable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Made = TypeVar("Made")

FILE = "config.json"
_COMMAND = "train.pretrain"


@dataclass(frozen=True)
class Run:
    """A run, as its folder remembers it.

    Attributes:
      config: The flags that it was started with.
      corpus: The name of its corpus by its contents.
      vocabulary: The name of its vocabulary, likewise.
      until: Steps to have trained at its end.
    """

    config: PretrainConfig
    corpus: str
    vocabulary: str
    until: int


def exists(folder: Path) -> bool:
    """Whether a folder remembers a run."""
    return (folder / FILE).exists()


def check_free(folder: Path) -> None:
    """Refuses a folder that a new run would overwrite something in.

    Args:
      folder: The folder.

    Raises:
      InputError: It is not a folder, or holds a run.
    """
    with writable(folder):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--out {folder} is a file; give a folder.")
        taken = (FILE, record.FILE, checkpoint.FOLDER)
        if any((folder / name).exists() for name in taken):
            raise InputError(
                f"{folder} already holds a run; go on with it by --resume, or give "
                "another --out."
            )


def check_own(run: Run) -> None:
    """Refuses to go on with another run's training.

    Args:
      run: The run, whose folder is its `out`.

    Raises:
      InputError: That folder remembers another run.
    """
    folder = run.config.out
    if not exists(folder):
        return
    found = read(folder)
    same_text = (found.corpus, found.vocabulary) == (run.corpus, run.vocabulary)
    if not (same_text and train_the_same(found.config, run.config)):
        raise InputError(
            f"{folder} holds another run, of other flags or another text; move it "
            "away to go on."
        )


def write(run: Run) -> None:
    """Remembers a run.

    Args:
      run: The run, whose folder is its `out`.

    Raises:
      InputError: The folder cannot be written to.
    """
    values = {
        "command": _COMMAND,
        "flags": to_json(run.config),
        "corpus": run.corpus,
        "vocabulary": run.vocabulary,
        "until": run.until,
    }
    write_values(run.config.out, values)


def read(folder: Path) -> Run:
    """Reads what `write` wrote.

    Args:
      folder: The run's folder.

    Returns:
      The run.

    Raises:
      InputError: There is no run, or one of another command, or its file is damaged.
    """
    return read_values(
        folder,
        _COMMAND,
        lambda values: Run(
            from_json(values["flags"]),
            values["corpus"],
            values["vocabulary"],
            values["until"],
        ),
    )


def write_values(folder: Path, values: dict[str, Any]) -> None:
    """Writes a run's file; all at once, so that a killed process leaves the one before.

    Args:
      folder: The run's folder, made where it is not there.
      values: What can be JSON.

    Raises:
      InputError: The folder cannot be written to.
    """
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / (FILE + ".new")
        new.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        new.replace(folder / FILE)


def read_values(
    folder: Path, command: str, make: Callable[[dict[str, Any]], Made]
) -> Made:
    """Reads what `write_values` wrote.

    Args:
      folder: The run's folder.
      command: The "command" whose run it must be.
      make: From the values to what is to be known of the run.

    Returns:
      What was made.

    Raises:
      InputError: There is no run, or one of another command, or its file is damaged.
    """
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"there is no run in {folder} ({FILE}: {error.strerror}); give the folder "
            "of one, or leave out --resume to start one."
        ) from error
    try:
        values = json.loads(text)
        if values["command"] == command:
            return make(values)
        own = values["command"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{folder / FILE} is damaged, or of another version; start a new run in "
            "another --out."
        ) from error
    raise InputError(f"{folder} holds a run of {own}; give one of {command}.")
