"""Fine-tuning for spans: parameters, loss, training as a task, and logits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models import BertForQuestionAnswering, span_loss
from train.core import objective
from train.core.batches import batches, endless, place
from train.core.mesh import AXIS
from train.core.processes.distributed import meet
from train.core.task import Task, identity, planned_phase
from train.squad.config import FREEZE
from train.squad.windows import sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.sharding import Mesh
    from jaxtyping import Array, Float, Int

    from models import BertConfig, SpanBatch
    from train.core.task import Params
    from train.squad.config import SquadConfig
    from train.squad.windows import Questions, Window


def init_params(
    config: BertConfig, seed: int, given: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The parameters that fine-tuning starts with: those given, the others random."""
    build = partial(BertForQuestionAnswering, config)
    return objective.init_params(build, seed) | (given or {})


def abstract_params(config: BertConfig) -> dict[str, Any]:
    """The shapes and dtypes of `init_params`."""
    return jax.eval_shape(lambda: init_params(config, 0))


def training_loss(
    config: BertConfig, seed: int, axes: str | tuple[str, ...] = AXIS
) -> Callable[[Params, SpanBatch, Int[Array, ""]], Float[Array, ""]]:
    """The loss of a worker's share of a batch, with dropout.

    Args:
      config: The model's sizes.
      seed: Decides the dropout, together with the step and the place of a window in
        the whole batch: the number of workers does not matter to it.
      axes: The mesh axes whose members are the workers.

    Returns:
      A function from parameters, the worker's share of a batch, and the number of
      earlier steps, for `onebit_jax.data_parallel`.
    """
    graph = objective.graph_of(partial(BertForQuestionAnswering, config))

    def loss_fn(
        params: Params, batch: SpanBatch, step: Int[Array, ""]
    ) -> Float[Array, ""]:
        share = batch.token_ids.shape[0]
        keys = objective.dropout_keys(config.dropout, seed, step, share, axes)
        model = nnx.merge(graph, params)
        starts, ends = model(batch.token_ids, batch.token_types, batch.lengths, keys)
        return span_loss(starts, ends, batch)

    return loss_fn


def make_task(
    config: SquadConfig,
    model: BertConfig,
    given: dict[str, Any],
    learnt: Questions,
    steps: int,
    mesh: Mesh,
    finish: Callable[[Params], None],
) -> Task:
    """The fine-tuning that the flags ask for.

    Args:
      config: The flags.
      model: The model's sizes.
      given: The parameters that do not start at random.
      learnt: The questions to learn from.
      steps: Steps to train.
      mesh: The workers.
      finish: Called with the parameters after the last step.

    Returns:
      The task.
    """
    build = partial(sequence, pieces=learnt.pieces, length=config.seq)
    ordered = endless(learnt.windows, config.seed).map(build)
    return Task(
        name=config.optimizer,
        model=identity(model, config.optimizer),
        init=lambda: init_params(model, config.seed, given),
        phases=[
            planned_phase(
                config,
                config.planned(steps, FREEZE),
                steps,
                mesh,
                loss=training_loss(model, config.seed, mesh.axis_names),
                batches=batches(ordered, config.batch),
            )
        ],
        finish=finish,
    )


def logits(
    config: SquadConfig,
    model: BertConfig,
    params: Params,
    questions: Questions,
    mesh: Mesh,
    expect: Callable[[str], None],
) -> tuple[Float[np.ndarray, "W T"], Float[np.ndarray, "W T"]]:
    """Scores every token of every window of questions.

    Args:
      config: The flags.
      model: The model's sizes.
      params: Its parameters, on the mesh.
      questions: The questions.
      mesh: The workers.
      expect: Told of each wait for the other processes; nothing, by an empty string.

    Returns:
      Start and end logits.
    """
    graph = objective.graph_of(partial(BertForQuestionAnswering, model))
    windows, batch = questions.windows, config.batch
    # This process's rows of a batch, and the scores of all rows.
    share = batch // jax.process_count()
    here = slice(jax.process_index() * share, (jax.process_index() + 1) * share)

    @partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def forward(params: Params, batch: SpanBatch) -> tuple[Array, Array]:
        model = nnx.merge(graph, params)
        return model(batch.token_ids, batch.token_types, batch.lengths)

    def placed(part: Sequence[Window]) -> SpanBatch:
        # The last batch is filled up, so that one program serves all.
        rows = [sequence(w, questions.pieces, config.seq) for w in part]
        rows += [rows[-1]] * (batch - len(rows))
        return place(jax.tree.map(lambda *x: np.stack(x), *rows[here]), mesh)

    expect("")  # a compilation waits for nobody
    program = forward.lower(params, placed(windows[:batch])).compile()
    meet()  # the answers have a time limit, compiling has none
    parts = []
    for first in range(0, len(windows), batch):
        part = windows[first : first + batch]
        expect(f"the answers to windows {first:,} to {first + len(part) - 1:,}")
        scores = jax.device_get(program(params, placed(part)))
        parts.append([x[: len(part)] for x in scores])
    expect("")
    starts, ends = (np.concatenate(x) for x in zip(*parts, strict=True))
    return starts, ends
