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
    """Holds a run's folder, on the process that writes; refuses one that is held."""
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


def _taken(folder: Path) -> IO[str]:
    """The file, once no other run holds it."""
    path = folder / FILE
    while True:
        file = path.open("a+", encoding="utf-8")
        if holder := _holder(file, path):
            file.close()
            raise InputError(
                f"{folder} is in use by another run ({holder}); wait for its end, or "
                "give another --out."
            )
        # Its last holder may have deleted it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()


def _holder(file: IO[str], path: Path) -> str | None:
    """The other run that holds the file, or gives signs of life; None if none does."""
    file.seek(0)
    machine, owner = [*file.read().splitlines(), "", ""][:2]
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_dead = not owner or machine == _machine()
    except OSError as error:
        if error.errno in _TAKEN:
            return owner or "that has just begun"
        if error.errno not in _NO_LOCKS:
            raise
        is_dead = not owner
    if is_dead:
        return None
    # The system's lock may not reach the machine that wrote this.
    say(f"{path.parent}: waiting {DEAD:.0f} s for a sign of life of {owner}")
    return owner if _lives(path) else None


def _lives(path: Path) -> bool:
    """True once the file's time changes; False if it does not, or the file is gone."""
    # Not by opening it: closing it again would end this process's lock.
    with contextlib.suppress(FileNotFoundError):
        first, deadline = path.stat().st_mtime_ns, time.monotonic() + DEAD
        while time.monotonic() < deadline:
            time.sleep(_POLL)
            if path.stat().st_mtime_ns != first:
                return True
    return False


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
