"""Labelled images: one, arrays of them, and a data set's two parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from train.core.errors import InputError

if TYPE_CHECKING:
    from grain.sources import RandomAccessDataSource
    from jaxtyping import Int, UInt8

HELD_OUT = 6
"""One image in so many is held out, where the data have no published test images."""


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
    """A division that is the same for all seeds, so that runs can be compared.

    Args:
      count: Images.

    Returns:
      The indices to learn from, and those held out, in random order.

    Raises:
      InputError: They are too few.
    """
    if count < HELD_OUT:
        raise InputError(
            f"{count} images are too few to hold one of six out; give more."
        )
    shuffled = np.random.default_rng(0).permutation(count)
    held_out = count // HELD_OUT
    return shuffled[held_out:], shuffled[:held_out]
