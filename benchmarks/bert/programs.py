"""The programs that `benchmarks.bert` times and compiles."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

import onebit_jax
from benchmarks.one_of_many import one_of_many
from models import SIZES, PreTrainingBatch
from train.bert.masked_pairs import num_predictions
from train.bert.objective import training_loss
from train.core.mesh import AXIS
from train.core.optimizer import learning_rate_schedule, make_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import optax
    from jax.sharding import Mesh

    from benchmarks.bert.config import Config
    from models import BertConfig

TOKENS = {"cpu": 1024, "gpu": 16384}
PEAK, CLIP, WEIGHT_DECAY = 4e-4, 1.0, 0.01
"""Learning rate, gradient norm and decay: BERT's."""


class Shape(NamedTuple):
    """The size of a computation.

    Attributes:
      model: A size by name.
      length: Tokens of a sequence.
      batch: Sequences.
      dtype: Name of the dtype that is computed in.
    """

    model: str
    length: int
    batch: int
    dtype: str

    @property
    def predictions(self) -> int:
        """Tokens of a sequence that are predicted."""
        return num_predictions(self.length)


class Programs(NamedTuple):
    """Functions to be compiled.

    Attributes:
      init: From parameters to parameters and optimizer state on the mesh.
      forward: From parameters, batch and number of earlier steps to the loss.
      gradients: From the same to the loss and its gradients.
      step: From parameters, state, batch and number of earlier steps to new
        parameters, new state and loss; the old ones are donated.
    """

    init: Callable[[Any], tuple[Any, Any]]
    forward: Any
    gradients: Any
    step: Any


def shapes(config: Config, platform: str) -> Iterator[Shape]:
    """The shapes that the flags name, or that suit the platform.

    Args:
      config: The flags.
      platform: 'cpu' or 'gpu'.

    Yields:
      A shape a model and length.
    """
    gpu = platform == "gpu"
    for model in config.models or (("large",) if gpu else ("mini",)):
        for length in config.seqs:
            batch = config.batch or max(1, TOKENS["gpu" if gpu else "cpu"] // length)
            dtype = config.dtype or ("bfloat16" if gpu else "float32")
            yield Shape(model, length, batch, dtype)


def variants(config: Config, platform: str) -> list[tuple[str, str]]:
    """Attention implementations by remat policies."""
    gpu = platform == "gpu"
    attentions = config.attentions or (("xla", "cudnn") if gpu else ("xla",))
    return [(attention, remat) for attention in attentions for remat in config.remats]


def model_config(shape: Shape, attention: str, remat: str, *, scan: bool) -> BertConfig:
    """The model of a case.

    Raises:
      ValueError: Its parts do not go together.
    """
    size = SIZES[shape.model]
    return dataclasses.replace(
        size,
        max_positions=max(size.max_positions, shape.length),
        dtype=shape.dtype,
        attention=attention,
        remat=remat,
        scan=scan,
    )


def make_batch(config: BertConfig, shape: Shape) -> PreTrainingBatch:
    """Full sequences of random tokens, 15 % of them predicted."""
    rng = np.random.default_rng(0)
    b, t, p = shape.batch, shape.length, shape.predictions

    def tokens(*size: int) -> np.ndarray:
        return rng.integers(0, config.vocab_size, size, np.int32)

    places = rng.permuted(np.tile(np.arange(t, dtype=np.int32), (b, 1)), axis=1)
    halves = np.arange(t, dtype=np.int32) >= t // 2
    return PreTrainingBatch(
        token_ids=tokens(b, t),
        token_types=np.tile(halves.astype(np.int32), (b, 1)),
        lengths=np.full(b, t, np.int32),
        masked_positions=np.sort(places[:, :p], axis=1),
        masked_labels=tokens(b, p),
        masked_weights=np.ones((b, p), np.float32),
        next_sentence_labels=rng.integers(0, 2, b, np.int32),
    )


def step_optimizer(name: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer of `train.pretrain`, with the work of one worker of several."""
    return make_optimizer(
        name,
        learning_rate_schedule(PEAK, 0, 1000),
        onebit_jax.freeze_at(1),
        one_of_many(AXIS),
        weight_decay=WEIGHT_DECAY,
        clip=CLIP,
    )


def programs(
    config: BertConfig, tx: optax.GradientTransformationExtraArgs, mesh: Mesh
) -> Programs:
    """The programs on a mesh of one device."""
    loss_fn = training_loss(config, 0)
    everywhere, split = PartitionSpec(), PartitionSpec(AXIS)

    def on_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
        def averaged(*args: Any) -> Any:
            return jax.lax.pmean(function(*args), AXIS)

        specs = (everywhere, split, everywhere)
        return jax.jit(
            jax.shard_map(averaged, mesh=mesh, in_specs=specs, out_specs=everywhere)
        )

    run = onebit_jax.data_parallel(loss_fn, tx, mesh)
    return Programs(
        run.init,
        on_mesh(loss_fn),
        on_mesh(onebit_jax.local_value_and_grad(loss_fn, AXIS)),
        run.step,
    )
