"""The stream of training images: a function of the seed and the index alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from train.core.batches import endless
from train.images.dataset import Labelled

if TYPE_CHECKING:
    import grain
    from grain.sources import RandomAccessDataSource
    from jaxtyping import UInt8

PADDING = 8
"""A border is the side divided by this: 4 of 32 pixels, at each end."""

GREY = 128
"""The padding's pixels, which the network sees as about zero."""


def examples(
    images: RandomAccessDataSource[Labelled], seed: int, *, augment: bool
) -> grain.MapDataset[Labelled]:
    """An endless sequence of images, each epoch shuffled anew.

    Args:
      images: What is learnt from.
      seed: Decides the order and the augmentation.
      augment: Whether images are cut from padded ones and mirrored.

    Returns:
      A data set whose example i is a function of the seed and i.
    """
    ordered = endless(images, seed)
    return ordered.random_map(augmented) if augment else ordered


def augmented(example: Labelled, rng: np.random.Generator) -> Labelled:
    """A random crop, of the image's size, of the image with a border, maybe mirrored.

    Args:
      example: The image and its class.
      rng: Source of the choice.

    Returns:
      The crop and the class.
    """
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
