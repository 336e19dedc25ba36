"""Fine-tuning for spans as a task of the training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.core.batches import batches
from train.core.task import Task, identity, planned_phase
from train.data.pieces import special_pieces
from train.squad.config import FREEZE
from train.squad.objective import examples, init_params, training_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.sharding import Mesh

    from models import BertConfig
    from train.core.task import Params
    from train.squad.config import SquadConfig
    from train.squad.initial_weights import InitialWeights
    from train.squad.windows import Window


def make_task(
    config: SquadConfig,
    model: BertConfig,
    weights: InitialWeights,
    learnt: Sequence[Window],
    steps: int,
    mesh: Mesh,
    finish: Callable[[Params], None],
) -> Task:
    """The fine-tuning that the flags ask for.

    Args:
      config: The flags.
      model: The model's sizes.
      weights: The weights to start from.
      learnt: The windows to learn from.
      steps: Steps to train.
      mesh: The workers.
      finish: Called with the parameters after the last step.

    Returns:
      The task.
    """
    pieces = special_pieces(weights.vocabulary)
    ordered = examples(learnt, pieces, config.seq, config.seed)
    return Task(
        name=config.optimizer,
        model=identity(model, config.optimizer),
        init=lambda: init_params(model, config.seed, weights.params),
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
