"""Pre-training as a task of the training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models import SIZES
from train.bert.objective import evaluation_loss, init_params, training_loss
from train.core.objective import mean_over
from train.core.task import Task, identity, planned_phase
from train.data.model_folder import write_model
from train.data.vocabulary import is_cased

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from train.bert.config import LengthPlan, PretrainConfig
    from train.bert.data import Data
    from train.bert.data import Phase as Batches
    from train.core.task import Phase


def make_task(
    config: PretrainConfig,
    data: Data,
    mesh: Mesh,
    until: int,
) -> Task:
    """The training that the flags ask for, whose steps are those of the schedule.

    Args:
      config: The flags.
      data: What to train on.
      mesh: The workers.
      until: Steps to have trained at the end.
    """
    size = SIZES[config.model]
    model = config.model_of(size, vocab_size=len(data.vocabulary))

    def phase_of(plan: LengthPlan, of_phase: Batches) -> Phase:
        last = plan.last if plan.last < config.total_steps else until
        several = len(config.phases) > 1
        title = f"sequences of {plan.seq} tokens to step {last:,}" if several else ""
        return planned_phase(
            config,
            plan,
            last,
            mesh,
            loss=training_loss(model, config.seed, mesh.axis_names, plan.accumulate),
            batches=of_phase.training,
            evaluation=mean_over(
                evaluation_loss(model), of_phase.held_out, config.eval_sequences, mesh
            ),
            eval_every=config.eval_every,
            title=title,
        )

    return Task(
        name=config.optimizer,
        model=identity(model, config.optimizer),
        init=lambda: init_params(model, config.seed),
        phases=[
            phase_of(*each) for each in zip(config.phases, data.phases, strict=True)
        ],
        finish=lambda params: write_model(
            config.out,
            model,
            params,
            "BertForPreTraining",
            data.vocabulary,
            cased=is_cased(data.vocabulary),
        ),
    )
