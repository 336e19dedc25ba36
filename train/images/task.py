"""Image classification as a task of the training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grain

from models import ConvolutionalConfig
from train.core.batches import batches
from train.core.task import Task, identity, planned_phase
from train.images.cifar import read_cifar
from train.images.examples import examples
from train.images.folder import read_folder
from train.images.objective import Network, evaluation, init_params, training_loss
from train.images.shipped import read_digits, read_mnist_5k

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from train.images.config import ImagesConfig
    from train.images.dataset import Dataset

SIZE = 32
"""Pixels of a side of a folder's images, where nothing else is asked for."""


def read(config: ImagesConfig) -> Dataset:
    """Reads the images that the flags name.

    Args:
      config: The flags.

    Returns:
      The images.

    Raises:
      InputError: They are not there, or damaged.
    """
    if config.path is None:
        return read_digits() if config.data == "digits" else read_mnist_5k()
    if config.data == "cifar-10":
        return read_cifar(config.path)
    return read_folder(config.path, config.size or SIZE)


def make_task(config: ImagesConfig, data: Dataset, mesh: Mesh, until: int) -> Task:
    """The training that the flags ask for.

    Args:
      config: The flags; their steps are those of the schedule.
      data: The images.
      mesh: The workers.
      until: Steps to have trained at the end.

    Returns:
      The task.
    """
    model = ConvolutionalConfig(
        architecture=config.model,
        num_classes=data.num_classes,
        channels=data.training[0].images.shape[-1],
        dtype=config.dtype,
    )
    held_out = grain.MapDataset.source(data.held_out)[: config.eval_images]
    network = Network(model)
    ordered = examples(data.training, config.seed, augment=config.augments)
    training = batches(ordered, config.batch)
    (plan,) = config.phases
    return Task(
        name=config.optimizer,
        model=identity(model, config.optimizer),
        init=lambda: init_params(model, config.seed),
        phases=[
            planned_phase(
                config,
                plan,
                until,
                mesh,
                loss=training_loss(network, config.accumulate),
                batches=training,
                evaluation=evaluation(
                    network,
                    training,
                    -(-config.statistics_images // config.batch),
                    held_out,
                    config.batch,
                    mesh,
                ),
                eval_every=config.eval_every,
            )
        ],
    )
