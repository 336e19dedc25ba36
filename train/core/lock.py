"""A lock on a run's folder, which a killed run leaves harmless.

The system's lock on a file ends with the process that holds it, however that ends, and
is kept between machines by NFS, GPFS and most others. Where a file system keeps it on
one machine only, or has none, the holder's signs of life count: the file's time is
renewed as long as it runs. No two machines' clocks are compared: a time that changes
is a run that lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from train.core.errors import InputError, writable
from train.core.output import is_main_process, say

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = ".lock"
BEAT = 5.0
"""Seconds between signs of life."""
DEAD = 30.0
"""Seconds without one after which another machine's run counts as dead."""

_POLL = 0.5
_TAKEN = errno.EACCES, errno.EAGAIN
_NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a run's folder, on the one process of many that writes.

    Args:
      folder: The folder; made where it is not there.

    Raises:
      InputError: Another run holds it.
    """
    if not is_main_process():
        yield
        return
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = _taken(folder)
        file.truncate(0)
        file.write(f"{_machine()}\n{socket.gethostname()}, process {os.getpid()}\n")
        file.flush()
    ended = threading.Event()
    beats = threading.Thread(target=_beat, args=(file, ended), daemon=True)
    beats.start()
    try:
        yield
    finally:
        ended.set()
        beats.join()
        (folder / FILE).unlink(missing_ok=True)
        file.close()


def check_unused(folder: Path) -> None:
    """Refuses a folder that another run is seen to hold, without holding it.

    Args:
      folder: The folder.

    Raises:
      InputError: Another run holds it by the system's lock.
    """
    path = folder / FILE
    if not (is_main_process() and path.exists()):
        return
    with writable(folder):
        file, is_locked = _opened(path)
    with file:
        if is_locked is False:
            raise _in_use(folder, _owner(file)[1])


def _in_use(folder: Path, owner: str) -> InputError:
    return InputError(
        f"{folder} is in use by another run ({owner or 'that has just begun'}); wait "
        "for its end, or give another --out."
    )


def _owner(file: IO[str]) -> tuple[str, str]:
    """The machine and the name of the process that wrote the file, or nothing."""
    file.seek(0)
    machine, owner = [*file.read().splitlines(), "", ""][:2]
    return machine, owner


def _taken(folder: Path) -> IO[str]:
    """The file, once no other run holds it or gives signs of life."""
    path = folder / FILE
    file, is_locked = _opened(path)
    machine, owner = _owner(file)
    is_held = is_locked is False
    if owner and not is_held and not (is_locked and machine == _machine()):
        # The system's lock may not reach the machine that wrote this.
        say(f"{folder}: waiting {DEAD:.0f} s for a sign of life of {owner}")
        is_held = _lives(path)
        if not is_held and _changed(path) is None:  # its run has ended meanwhile
            file.close()
            return _taken(folder)
    if not is_held:
        return file
    file.close()
    raise _in_use(folder, owner)


def _lives(path: Path) -> bool:
    """True once the file's time changes; False if it does not, or the file is gone."""
    first, deadline = _changed(path), time.monotonic() + DEAD
    while first is not None and time.monotonic() < deadline:
        time.sleep(_POLL)
        now = _changed(path)
        if now != first:
            return now is not None
    return False


def _changed(path: Path) -> int | None:
    """The time at which a file was changed; None for one that is not there."""
    # Not by opening it: closing it again would end this process's lock.
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _opened(path: Path) -> tuple[IO[str], bool | None]:
    """The file, and True if it is locked now, False if another has it, None if neither.

    Neither where the file system has no locks.
    """
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (*_TAKEN, *_NO_LOCKS):
                raise
            return file, False if error.errno in _TAKEN else None
        # Its last holder may have deleted it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file, True
        file.close()


def _beat(file: IO[str], ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        # A network's file system fails now and then, and a thread that ended by it
        # would leave the folder to another machine.
        with contextlib.suppress(OSError):
            os.utime(file.fileno())


def _machine() -> str:
    """A name that no other machine has, nor this one after it was started again."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()
