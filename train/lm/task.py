"""Predicting the next token as a task of the training loop."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from flax import nnx

from models import DECODER_SIZES, Decoder, next_token_loss
from train.core import objective
from train.core.mesh import AXIS
from train.core.task import Task, identity, planned_phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh
    from jaxtyping import Array, Float, Int, Key

    from models import DecoderConfig
    from train.core.task import Params
    from train.lm.config import LmConfig
    from train.lm.data import Data


def training_loss(
    config: DecoderConfig,
    seed: int,
    axes: str | tuple[str, ...] = AXIS,
    accumulate: int = 1,
) -> Callable[[Params, Int[Array, "B T+1"], Int[Array, ""]], Float[Array, ""]]:
    """The loss of a worker's share of a batch, with dropout.

    Args:
      config: The model's sizes.
      seed: Decides the dropout, together with the step and the place of a sequence in
        the whole batch: the number of workers does not matter to it, nor that of
        micro-batches.
      axes: The mesh axes whose members are the workers.
      accumulate: Micro-batches that a share is computed in, one after another.

    Returns:
      A function from parameters, the worker's windows, and the number of earlier
      steps, for `onebit_jax.data_parallel`.
    """
    graph = objective.graph_of(partial(Decoder, config))

    def share_of(
        params: Params,
        part: tuple[Int[Array, "B T+1"], Key[Array, " B"] | None],
        parts: int,
    ) -> Float[Array, ""]:
        return next_token_loss(nnx.merge(graph, params), *part) / parts

    def loss_fn(
        params: Params, windows: Int[Array, "B T+1"], step: Int[Array, ""]
    ) -> Float[Array, ""]:
        share = windows.shape[0]
        keys = objective.dropout_keys(config.dropout, seed, step, share, axes)
        return objective.accumulated(share_of, accumulate)(
            params, (windows, keys), accumulate
        )

    return loss_fn


def evaluation_loss(
    config: DecoderConfig,
) -> Callable[[Params, Int[Array, "B T+1"]], Float[Array, ""]]:
    """The loss of a whole batch, without dropout."""
    graph = objective.graph_of(partial(Decoder, config))
    return lambda params, windows: next_token_loss(nnx.merge(graph, params), windows)


def make_task(
    config: LmConfig,
    data: Data,
    mesh: Mesh,
    until: int,
) -> Task:
    """The training that the flags ask for, whose steps are those of the schedule.

    Args:
      config: The flags.
      data: The text.
      mesh: The workers.
      until: Steps to have trained at the end.
    """
    size = DECODER_SIZES[config.model]
    model = config.model_of(size, vocab_size=data.coding.vocab_size)
    (plan,) = config.phases
    phase = planned_phase(
        config,
        plan,
        until,
        mesh,
        loss=training_loss(model, config.seed, mesh.axis_names, config.accumulate),
        batches=data.training,
        evaluation=objective.mean_over(
            evaluation_loss(model), data.held_out, data.evaluated, mesh
        ),
        eval_every=config.eval_every,
    )
    return Task(
        name=config.optimizer,
        model=identity(model, config.optimizer),
        init=lambda: objective.init_params(partial(Decoder, model), config.seed),
        phases=[phase],
    )
