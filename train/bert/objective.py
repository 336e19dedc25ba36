"""The model's parameters as a plain tree, and what is minimised."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from models import BertForPreTraining, pretraining_losses
from train.core import objective
from train.core.mesh import AXIS

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Float, Int, Key

    from models import BertConfig, PreTrainingBatch
    from train.core.task import Params


def init_params(config: BertConfig, seed: int) -> Params:
    """The parameters a model starts with, a function of its sizes and the seed."""
    return objective.init_params(partial(BertForPreTraining, config), seed)


def abstract_params(config: BertConfig) -> Params:
    """The shapes and dtypes of `init_params`."""
    return jax.eval_shape(lambda: init_params(config, 0))


def training_loss(
    config: BertConfig,
    seed: int,
    axes: str | tuple[str, ...] = AXIS,
    accumulate: int = 1,
) -> Callable[[Params, PreTrainingBatch, Int[Array, ""]], Float[Array, ""]]:
    """The loss of a worker's share of a batch, with dropout.

    The masked-LM loss is a mean over the predictions of the whole share, and so are its
    gradients, in however many micro-batches they are computed.

    Args:
      config: The model's sizes.
      seed: Decides the dropout, together with the step and the place of a sequence in
        the whole batch: the number of workers does not matter to it, nor that of
        micro-batches.
      axes: The mesh axes whose members are the workers.
      accumulate: Micro-batches that a share is computed in, one after another.

    Returns:
      A function from parameters, the worker's share of a batch, and the number of
      earlier steps, for `onebit_jax.data_parallel`.
    """
    losses = _losses(config)

    def sum_of(
        params: Params,
        part: tuple[PreTrainingBatch, Key[Array, " B"] | None],
        whole: tuple[int, Float[Array, ""]],
    ) -> Float[Array, ""]:
        (batch, keys), (sequences, predictions) = part, whole
        masked, next_sentence = losses(params, batch, keys)
        # From means over the part to its share of the means over the whole.
        here = jnp.maximum(jnp.sum(batch.masked_weights), 1.0)
        count = batch.token_ids.shape[0]
        return masked * (here / predictions) + next_sentence * (count / sequences)

    def loss_fn(
        params: Params, batch: PreTrainingBatch, step: Int[Array, ""]
    ) -> Float[Array, ""]:
        share = batch.token_ids.shape[0]
        keys = objective.dropout_keys(config.dropout, seed, step, share, axes)
        predictions = jnp.maximum(jnp.sum(batch.masked_weights), 1.0)
        return objective.accumulated(sum_of, accumulate)(
            params, (batch, keys), (share, predictions)
        )

    return loss_fn


def evaluation_loss(
    config: BertConfig,
) -> Callable[[Params, PreTrainingBatch], Float[Array, ""]]:
    """The loss of a whole batch, without dropout."""
    losses = _losses(config)

    def loss_fn(params: Params, batch: PreTrainingBatch) -> Float[Array, ""]:
        masked, next_sentence = losses(params, batch)
        return masked + next_sentence

    return loss_fn


def _losses(
    config: BertConfig,
) -> Callable[..., tuple[Float[Array, ""], Float[Array, ""]]]:
    """From parameters, a batch and keys of dropout to the two losses."""
    graph = objective.graph_of(partial(BertForPreTraining, config))

    def losses(
        params: Params, batch: PreTrainingBatch, keys: Key[Array, " B"] | None = None
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        return pretraining_losses(*nnx.merge(graph, params)(batch, keys), batch)

    return losses
