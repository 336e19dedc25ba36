"""A folder of images with a folder inside it for each class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from train.core.errors import InputError
from train.core.run_folder import contents_name
from train.images.data import Dataset, Labelled, split

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jaxtyping import Int, UInt8

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
"""Endings of the names of image files, in small or capital letters."""

_PARTS = {"test", "train", "training", "val", "valid", "validation"}
"""Names of a data set's parts, each of which has the folders of all classes."""


def read_folder(folder: Path, size: int) -> Dataset:
    """Lists the images of a folder, which are read when they are needed.

    The names of the folders in it, in order, are the classes; hidden files and folders
    are left out. Images are scaled and cut to a side of `size` pixels, one of six is
    held out, and their name is a hash of the files' paths and sizes, not of the pixels.

    Raises:
      InputError: There are fewer than two classes, or a class without images.
    """
    if not folder.is_dir():
        raise InputError(f"--path {folder} is not a folder; give one of images.")
    classes = sorted(x for x in folder.iterdir() if x.is_dir() and x.name[0] != ".")
    if len(classes) < 2:
        raise InputError(
            f"{folder} has {len(classes)} folders in it; give one with a folder of "
            "images for each of two or more classes."
        )
    parts = [x.name for x in classes if x.name.lower() in _PARTS]
    if len(parts) == len(classes):
        raise InputError(
            f"{folder} has no classes in it but the parts {', '.join(parts)} of a data "
            f"set; give one of these, such as --path {folder / parts[0]}."
        )
    paths: list[Path] = []
    labels: list[int] = []
    for label, inside in enumerate(classes):
        images = sorted(
            x
            for x in inside.rglob("*")
            if x.suffix.lower() in SUFFIXES
            and x.is_file()  # no link to nothing
            and not any(part[0] == "." for part in x.relative_to(inside).parts)
        )
        if not images:
            raise InputError(
                f"{inside} holds no image ({', '.join(SUFFIXES)}); add some, or move "
                "it away."
            )
        paths += images
        labels += [label] * len(images)
    names = [f"{x.relative_to(folder).as_posix()} {x.stat().st_size}" for x in paths]
    training, held_out = split(len(paths))
    return Dataset(
        training=_Files(paths, labels, training, size),
        held_out=_Files(paths, labels, held_out, size),
        num_classes=len(classes),
        contents=contents_name(*names),
    )


@dataclass(frozen=True, eq=False)
class _Files:
    """Examples in files."""

    paths: Sequence[Path]
    labels: Sequence[int]
    chosen: Int[np.ndarray, " N"]
    size: int

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Labelled:
        i = self.chosen[index]
        return Labelled(_decoded(self.paths[i], self.size), np.int32(self.labels[i]))


def _decoded(path: Path, size: int) -> UInt8[np.ndarray, "S S 3"]:
    """The middle of an image, scaled so that its shorter side is `size`."""
    from PIL import Image, ImageOps  # other data need no decoder

    # What Pillow raises for files that are damaged or too large.
    unreadable = OSError, SyntaxError, ValueError, Image.DecompressionBombError
    try:
        with Image.open(path) as image:
            colours = image.convert("RGB")
    except unreadable as error:
        raise InputError(
            f"{path} cannot be read as an image ({error}); restore it, or move it away "
            "and start a new run."
        ) from error
    return np.asarray(ImageOps.fit(colours, (size, size)))
