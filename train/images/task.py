"""Image classification as a task of the training loop: loss, evaluation, phase."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models import ConvolutionalConfig, convolutional, pooled_statistics
from models.losses import cross_entropy
from train.core import objective
from train.core.batches import batches, element, place
from train.core.task import Task, identity, planned_phase
from train.images.cifar import read_cifar
from train.images.data import Labelled, examples, read_digits, read_mnist_5k
from train.images.folder import read_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jax.sharding import Mesh
    from jaxtyping import Array, Float, Int, UInt8

    from train.core.task import Evaluation, Params
    from train.images.config import ImagesConfig
    from train.images.data import Dataset

SIZE = 32
"""Pixels of a side of a folder's images, where nothing else is asked for."""

Statistics = Any
"""Mean and variance of each batch normalisation's input, as nested dictionaries."""


def read(config: ImagesConfig) -> Dataset:
    """Reads the images that the flags name; refuses those missing or damaged."""
    if config.path is None:
        return read_digits() if config.data == "digits" else read_mnist_5k()
    if config.data == "cifar-10":
        return read_cifar(config.path)
    return read_folder(config.path, config.size or SIZE)


def init_params(config: ConvolutionalConfig, seed: int) -> Params:
    """The parameters a network starts with, a function of its sizes and the seed."""
    return objective.init_params(partial(convolutional, config), seed)


class Network:
    """A network as functions of its parameters, from pixels to logits.

    Args:
      config: The network's.
    """

    def __init__(self, config: ConvolutionalConfig):
        model = nnx.eval_shape(lambda: convolutional(config, rngs=nnx.Rngs(0)))
        self.graph, _, statistics = nnx.split(model, nnx.Param, nnx.BatchStat)
        self.unused = jax.tree.map(
            lambda x: np.zeros(x.shape, x.dtype), nnx.to_pure_dict(statistics)
        )

    def train(
        self, params: Params, images: UInt8[Array, "B H W C"]
    ) -> tuple[Float[Array, "B classes"], Statistics]:
        """Logits of images that are normalised together, and their statistics."""
        unused = jax.tree.map(jnp.asarray, self.unused)
        model = nnx.merge(self.graph, params, unused)
        logits = model(_scaled(images))
        return logits, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    def evaluate(
        self, params: Params, statistics: Statistics, images: UInt8[Array, "B H W C"]
    ) -> Float[Array, "B classes"]:
        """Logits of images that are normalised by given statistics, each by itself."""
        model = nnx.merge(self.graph, params, statistics)
        model.eval()
        return model(_scaled(images))

    def judge(
        self,
        params: Params,
        statistics: Statistics,
        part: Labelled,
        weights: Float[Array, " B"],
    ) -> Float[Array, " 2"]:
        """Weighted sums of images' losses and of those that are classified right."""
        logits = self.evaluate(params, statistics, part.images)
        losses = cross_entropy(logits, part.labels)
        right = (jnp.argmax(logits, axis=1) == part.labels).astype(losses.dtype)
        return jnp.stack([jnp.sum(weights * x) for x in (losses, right)])


def _scaled(images: UInt8[Array, "B H W C"]) -> Float[Array, "B H W C"]:
    """Pixels from -1 to 1."""
    return images.astype(jnp.float32) / 127.5 - 1.0


def training_loss(
    network: Network, accumulate: int = 1
) -> Callable[[Params, Labelled, Int[Array, ""]], Float[Array, ""]]:
    """The mean loss of a worker's share of a batch, normalised by that share.

    Args:
      network: The network.
      accumulate: Parts that a share is computed in, one after another, each normalised
        by itself.

    Returns:
      A function from parameters, the worker's share of a batch, and the number of
      earlier steps, for `onebit_jax.data_parallel`.
    """

    def share_of(params: Params, part: Labelled, parts: int) -> Float[Array, ""]:
        logits, _ = network.train(params, part.images)
        return jnp.mean(cross_entropy(logits, part.labels)) / parts

    def loss_fn(
        params: Params, batch: Labelled, step: Int[Array, ""]
    ) -> Float[Array, ""]:
        del step
        return objective.accumulated(share_of, accumulate)(params, batch, accumulate)

    return loss_fn


def evaluation(
    network: Network,
    training: grain.MapDataset[Labelled],
    num_statistics: int,
    held_out: grain.MapDataset[Labelled],
    batch: int,
    mesh: Mesh,
) -> Callable[[Params], Evaluation]:
    """The mean loss and the accuracy of held-out images.

    Images are normalised by statistics that are estimated anew from the first training
    batches ("precise" batch normalisation: Wu and Johnson, `Rethinking "Batch" in
    BatchNorm <https://arxiv.org/abs/2105.07576>`_, 2021), each taken whole: the result
    is a function of the parameters, whatever the number of workers.

    Args:
      network: The network.
      training: Element t is this process's part of the batch of step t.
      num_statistics: Training batches to estimate statistics from.
      held_out: The images of the evaluation.
      batch: Images at a time; a multiple of the workers.
      mesh: The workers.

    Returns:
      For `train.core.task.Phase`.
    """

    def statistics(params: Params, part: Labelled) -> Statistics:
        return network.train(params, part.images)[1]

    def compiled(params: Params) -> Evaluation:
        def compile_for(function: Callable[..., Any], *arguments: Any) -> Any:
            everywhere = NamedSharding(mesh, PartitionSpec())
            jitted = jax.jit(function, out_shardings=everywhere)
            return jitted.lower(params, *arguments).compile()

        first = next(_parts(held_out, batch))
        estimate = compile_for(statistics, place(element(training, 0), mesh))
        judge = compile_for(network.judge, network.unused, *place(first, mesh))

        def evaluate(params: Params) -> dict[str, float]:
            # One program at a time: those of virtual devices can block each other.
            several = [
                jax.device_get(estimate(params, place(element(training, i), mesh)))
                for i in range(num_statistics)
            ]
            pooled = pooled_statistics(several)
            total = np.zeros(2)
            for part in _parts(held_out, batch):
                total += jax.device_get(judge(params, pooled, *place(part, mesh)))
            loss, accuracy = (total / len(held_out)).tolist()
            return {"loss": loss, "accuracy": accuracy}

        return evaluate

    return compiled


def _parts(
    images: grain.MapDataset[Labelled], batch: int
) -> Iterator[tuple[Labelled, Float[np.ndarray, " B"]]]:
    """This process's part of batches of images with weights, those of padding zero."""
    share = batch // jax.process_count()
    start = jax.process_index() * share
    for first in range(0, len(images), batch):
        places = np.arange(first + start, first + start + share)
        rows = [element(images, min(i, len(images) - 1)) for i in places.tolist()]
        weights = (places < len(images)).astype(np.float32)
        yield Labelled(*(np.stack(x) for x in zip(*rows, strict=True))), weights


def make_task(config: ImagesConfig, data: Dataset, mesh: Mesh, until: int) -> Task:
    """The training that the flags ask for, whose steps are those of the schedule.

    Args:
      config: The flags.
      data: The images.
      mesh: The workers.
      until: Steps to have trained at the end.
    """
    model = ConvolutionalConfig(
        architecture=config.model,
        num_classes=data.num_classes,
        channels=data.training[0].images.shape[-1],
        dtype=config.dtype,
    )
    held_out = grain.MapDataset.source(data.held_out)
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
