"""Arrays larger than memory: files that grow, read at random, in folders made whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from train.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import DTypeLike


@contextlib.contextmanager
def growing_array(path: Path, dtype: DTypeLike) -> Iterator[Callable[[Any], None]]:
    """A `.npy` file that values are appended to, by the function that is yielded."""
    count = 0

    def append(values: Any) -> None:
        nonlocal count
        array = np.asarray(values, dtype).ravel()
        file.write(array.tobytes())
        count += len(array)

    def write_header() -> None:
        # NumPy leaves room in it for the first axis to grow.
        descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
        header = {"descr": descr, "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, header)

    with path.open("wb") as file:
        write_header()
        yield append
        file.seek(0)
        write_header()
        # A folder is renamed when it is whole, also where the power fails.
        file.flush()
        os.fsync(file.fileno())


def mapped_array(path: Path) -> np.ndarray:
    """An array of a `.npy` file, of which memory holds the parts that are read.

    The file is in a folder of the folder of one tokenised corpus.

    Raises:
      InputError: It is cut short or gone, or cannot be read.
    """
    try:
        return np.asarray(np.load(path, mmap_mode="r"))
    except (FileNotFoundError, ValueError, EOFError) as error:
        raise InputError(
            f"{path} is damaged; delete the folder {path.parent.parent}, which is made "
            "again."
        ) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); mend that and start again."
        ) from error


def make_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder all at once, by what fills a new one, unless it is there.

    A folder that a killed process has left unfinished is removed, and made anew. Of
    processes that make the same one at the same time, the first that is ready wins.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
    new.mkdir()  # not by `tempfile`, whose folders nobody else may read
    try:
        fill(new)
        new.rename(path)
    except OSError:
        if not path.exists():
            raise
    finally:
        unfinished = path.parent.glob(f"{path.name}.*.new") if path.exists() else [new]
        for folder in unfinished:
            shutil.rmtree(folder, ignore_errors=True)
