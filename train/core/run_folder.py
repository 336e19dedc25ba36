"""A run's folder: its flags, the hashes of its data, the steps to train."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax

from train.core import checkpoint, lock, metrics_log
from train.core.errors import InputError, writable
from train.core.flags import (
    TrainingFlags,
    check_resumable,
    from_json,
    spelling,
    to_json,
)
from train.core.output import is_main_process
from train.core.processes.distributed import check_agreed, check_shared
from train.core.text_file import replace_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from train.core.processes.watchdog import Watchdog

Flags = TypeVar("Flags", bound=TrainingFlags)

FILE = "config.json"


@dataclass(frozen=True)
class Run(Generic[Flags]):
    """A run, as its folder remembers it.

    Attributes:
      command: The module that Python ran.
      flags: The flags that it was started with; `out` is its folder.
      contents: Hashes of its data by their kind, such as `corpus`.
      until: Steps to have trained at its end.
    """

    command: str
    flags: Flags
    contents: Mapping[str, str]
    until: int


def contents_name(*parts: bytes | str) -> str:
    """The SHA-256 of data, by which a run names them."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\n")
    return digest.hexdigest()


def exists(folder: Path) -> bool:
    """True if a folder remembers a run."""
    return (folder / FILE).exists()


def check_free(folder: Path) -> None:
    """Refuses a folder that a new run would overwrite something in."""
    with writable(folder):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--out {folder} is a file; give a folder.")
        taken = (FILE, metrics_log.FILE, checkpoint.FOLDER)
        is_taken = any((folder / name).exists() for name in taken)
    if is_taken:
        with lock.held(folder):  # or else process 0 tells of the run that is in it
            raise InputError(
                f"{folder} already holds a run; go on with it by --resume, or give "
                "another --out."
            )


def check_contents(
    run: Run, contents: Mapping[str, str], advice: Mapping[str, str] | None = None
) -> None:
    """Refuses to go on with other data, by their names, than a run was started with.

    The advice says of each what to do: to restore it where there is none.
    """
    for what, name in contents.items():
        if run.contents[what] != name:
            cure = (advice or {}).get(what, "restore it")
            raise InputError(
                f"the {what} is not the one that the run in {run.flags.out} was "
                f"started with; {cure}, or start a new run in another --out."
            )


def run_of(
    config: Flags, command: str, contents: Mapping[str, str], until: int
) -> Run[Flags]:
    """The run that begins in a free folder, or goes on to the steps it was made for.

    Raises:
      InputError: The folder is taken, or does not hold this run.
    """
    if not config.resume:
        check_free(config.out)
        return Run(command, config, contents, until)
    run = read(config.out, command, type(config))
    check_resumable(run.flags, config)
    check_contents(run, contents)
    return run


@contextlib.contextmanager
def begun(
    runs: Sequence[Run],
    given: TrainingFlags,
    write_files: Callable[[Path], None],
    watchdog: Watchdog,
) -> Iterator[None]:
    """Locks runs' folders, and makes the first once all processes have looked at it.

    Args:
      runs: The runs that are to begin or to go on; the first's folder is that of all.
      given: The flags of this process's command line.
      write_files: Writes into that folder what it lacks, on one process.
      watchdog: Told of the wait for the other processes.

    Raises:
      InputError: Another run uses the folder, or has begun in it meanwhile; or
        processes differ in what they are asked for, or do not share the folder.
    """
    first, folder = runs[0], runs[0].flags.out
    with contextlib.ExitStack() as locks:
        for run in runs:
            locks.enter_context(lock.held(run.flags.out))
        if not given.resume:
            # Reading the data can take so long that another run has come and gone.
            for run in runs:
                check_free(run.flags.out)
        watchdog.expect("the start of all processes")
        newest = [checkpoint.latest_step(run.flags.out) for run in runs]
        flags = {spelling(n): json.dumps(x) for n, x in to_json(given).items()}
        check_agreed({"list of flags": " ".join(flags)})  # as other versions have
        check_agreed(
            {
                **first.contents,
                **flags,
                "newest checkpoint in --out": str(newest),
                "JAX": jax.__version__,
            }
        )
        if is_main_process():
            with writable(folder):
                write_files(folder)
        for run in runs:
            # A folder with a checkpoint in it must say whose it is.
            if not exists(run.flags.out):
                write(run)
        check_shared(folder / FILE)
        yield


def write(run: Run) -> None:
    """Remembers a run in the folder of its flags, on one process of many."""
    if is_main_process():
        folder, values = run.flags.out, {**vars(run), "flags": to_json(run.flags)}
        with writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / FILE, json.dumps(values, indent=2) + "\n")


def read(folder: Path, command: str, kind: type[Flags]) -> Run[Flags]:
    """Reads a run of a command, whose flags are of a kind, from its folder.

    Raises:
      InputError: There is no run, or one of another command, or its file is damaged.
    """
    values = _remembered(folder, *Run.__dataclass_fields__)
    if values["command"] != command:
        raise InputError(
            f"{folder} holds a run of {values['command']}; give one of {command}."
        )
    try:
        flags = from_json(kind, values["flags"])
    except TypeError as error:
        raise _damaged(folder) from error
    flags = replace(flags, out=folder)  # it may have been moved
    return Run(command, flags, values["contents"], values["until"])


def command_of(folder: Path) -> str:
    """The module whose run a folder holds; refuses a folder without one."""
    return _remembered(folder, "command")["command"]


def is_of(folder: Path, command: str) -> bool:
    """True if a folder holds a run of a command."""
    try:
        return command_of(folder) == command
    except InputError:  # none, or another config.json
        return False


def flags_of(folder: Path) -> Mapping[str, Any]:
    """The flags of a folder's run, of whatever command, as its file has them."""
    return _remembered(folder, "flags")["flags"]


def _remembered(folder: Path, *names: str) -> dict[str, Any]:
    """A run's file; refuses one that lacks any of some names."""
    try:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"there is no run in {folder} ({FILE}: {error.strerror}); give the folder "
            "of one, or leave out --resume to start one."
        ) from error
    except ValueError as error:
        raise _damaged(folder) from error
    if not (isinstance(values, dict) and values.keys() >= set(names)):
        raise _damaged(folder)
    return values


def _damaged(folder: Path) -> InputError:
    return InputError(
        f"{folder / FILE} is damaged, or of another version; start a new run in "
        "another --out."
    )
