"""`python -m train.images`: trains a network to classify images.

`--help` lists the flags. A run leaves in its folder `config.json` (what was asked for),
`checkpoints`, `metrics.jsonl` and `training.png`; with `--compare` plain Adam's own are
in the folder `adam` inside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.core.commands import Command, parse_flags, run_command, train_from_scratch
from train.core.processes.distributed import Cluster
from train.core.run_folder import check_contents
from train.images.config import ImagesConfig, check
from train.images.task import make_task, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train.core.run_folder import Run
    from train.images.data import Dataset

MODULE = "train.images"


def parse(arguments: Sequence[str]) -> Command[ImagesConfig]:
    """Reads the flags; a run that goes on has its own for those not given."""
    return parse_flags(ImagesConfig(), arguments, MODULE)


def load(
    config: ImagesConfig, run: Run[ImagesConfig] | None = None
) -> tuple[dict[str, str], Dataset]:
    """Reads the images, which must be those of a run that goes on, and their hash."""
    data = read(config)
    contents = {"set of images": data.contents}
    if run:
        check_contents(run, contents)
    return contents, data


def train_images(config: ImagesConfig, timeout: float = Cluster.timeout) -> None:
    """Trains what the flags ask for, the same in all processes, and draws the picture.

    Raises:
      InputError: The flags, or what they name, cannot be used.
      LostError: Another process is gone, or takes longer than `timeout` seconds.
    """
    check(config)
    train_from_scratch(
        config,
        MODULE,
        timeout,
        load=load,
        about=lambda data: (
            f"{config.model}, {len(data.training):,} images of "
            f"{data.num_classes} classes, {len(data.held_out):,} held out"
        ),
        make_task=make_task,
    )


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence."""
    run_command(parse, check, train_images)
