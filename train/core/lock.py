"""A lock on a run's folder, which a killed run leaves harmless.

The system's lock on a file ends with the process that holds it, however that ends, and
is kept between machines by NFS, GPFS and most others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from typing import IO, TYPE_CHECKING

from train.core.errors import InputError, writable
from train.core.output import is_main_process, say

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE = ".lock"

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
        file.write(f"{socket.gethostname()}, process {os.getpid()}\n")
        file.flush()
    try:
        yield
    finally:
        (folder / FILE).unlink(missing_ok=True)
        file.close()


def _taken(folder: Path) -> IO[str]:
    """The file, once no other run holds it."""
    path = folder / FILE
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                say(f"{folder} has no locks on files: start no second run in it")
                return file
            if error.errno not in _TAKEN:
                raise
            file.seek(0)
            owner = file.read().strip() or "that has just begun"
            file.close()
            raise InputError(
                f"{folder} is in use by another run ({owner}); wait for its end, or "
                "give another --out."
            ) from error
        # Its last holder may have deleted it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()
