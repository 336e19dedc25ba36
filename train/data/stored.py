"""Arrays that grow in files and are read at random from there, larger than memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from train.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from jaxtyping import Shaped
    from numpy.typing import DTypeLike


class Growing:
    """A `.npy` file that rows are appended to.

    Args:
      path: The file.
      dtype: What the rows are of.
      row: The shape of a row.
    """

    def __init__(self, path: Path, dtype: DTypeLike, row: tuple[int, ...] = ()):
        self._dtype, self._row, self._rows = np.dtype(dtype), row, 0
        self._file = path.open("wb")
        self._write_header()

    def __enter__(self) -> Self:
        """The file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Says how many rows there are."""
        self._file.seek(0)
        self._write_header()
        # A folder is renamed when it is whole, also where the power fails.
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def append(self, rows: Shaped[np.ndarray, "rows ..."]) -> None:
        """Adds rows at the end."""
        self._file.write(np.ascontiguousarray(rows, self._dtype).tobytes())
        self._rows += len(rows)

    def _write_header(self) -> None:
        # NumPy leaves room in it for the first axis to grow.
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._rows, *self._row),
        }
        np.lib.format.write_array_header_1_0(self._file, header)


def mapped(path: Path) -> np.ndarray:
    """An array of a `.npy` file, of which memory holds what is looked at.

    Args:
      path: The file, in a folder of the folder of one tokenised corpus.

    Returns:
      The array.

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


def make(path: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder all at once, unless it is there.

    What a killed process leaves is made anew, and removed. Processes that make the same
    one at the same time do not disturb each other: the first that is ready wins.

    Args:
      path: The folder.
      fill: What writes into a new folder, which then becomes this one.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(".new", f"{path.name}.", path.parent))
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
