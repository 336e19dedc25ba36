"""CIFAR-10 as published: five files of training images and one of test images."""

from __future__ import annotations

import codecs
import io
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from train.core.errors import InputError
from train.core.run_folder import contents_name
from train.images.data import Arrays, Dataset

if TYPE_CHECKING:
    from pathlib import Path

    from jaxtyping import UInt8

TRAINING = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"
CLASSES, SIDE, COLOURS = 10, 32, 3
VALUES = COLOURS * SIDE * SIDE


def read_cifar(folder: Path) -> Dataset:
    """Reads the files of `cifar-10-batches-bin` or of `cifar-10-batches-py`.

    The published test images are held out.

    Raises:
      InputError: A file is missing, or not one of CIFAR-10's.
    """
    parts = []
    for name in (*TRAINING, TEST):
        binary, pickled = folder / f"{name}.bin", folder / name
        try:
            parts.append(_rows(binary if binary.exists() else pickled))
        except OSError as error:
            raise InputError(
                f"{pickled} cannot be read ({error.strerror}), nor is there "
                f"{binary.name}; give as --path the folder cifar-10-batches-bin or "
                "cifar-10-batches-py."
            ) from error
    training = np.concatenate(parts[:-1])
    return Dataset(
        training=_arrays(training),
        held_out=_arrays(parts[-1]),
        num_classes=CLASSES,
        contents=contents_name(training.tobytes(), parts[-1].tobytes()),
    )


def _arrays(rows: UInt8[np.ndarray, "N 3073"]) -> Arrays:
    # A row is a label, then all reds, all greens, all blues.
    images = rows[:, 1:].reshape(-1, COLOURS, SIDE, SIDE).transpose(0, 2, 3, 1)
    return Arrays(np.ascontiguousarray(images), rows[:, 0])


def _rows(file: Path) -> UInt8[np.ndarray, "N 3073"]:
    """The rows of a binary file, which one for Python has as an array and labels."""
    content = file.read_bytes()
    try:
        if file.suffix:
            rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + VALUES)
        else:
            batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
            labels = np.array(batch[b"labels"], np.uint8)[:, None]
            rows = np.concatenate([labels, batch[b"data"]], axis=1, dtype=np.uint8)
        if rows.shape[1] != 1 + VALUES or rows[:, 0].max() >= CLASSES:
            raise ValueError(f"labels are below 10 and an image has {VALUES} values")
    # A damaged pickle can end in any error.
    except Exception as error:
        raise InputError(
            f"{file} is not a file of CIFAR-10 ({error}); unpack it anew."
        ) from error
    return rows


def _dtype(kind: str, *_: Any) -> np.dtype:
    # Python 2 wrote its flags as numbers, of which NumPy warns.
    return np.dtype(kind, copy=True)


class _ArraysOnly(pickle.Unpickler):
    """Reads arrays, and runs nothing else that a file may name."""

    KNOWN = {  # noqa: RUF012
        "_reconstruct": np.empty(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": _dtype,
        "encode": codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.KNOWN:
            return self.KNOWN[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}")
