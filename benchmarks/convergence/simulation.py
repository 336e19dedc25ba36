"""A training whose workers one device simulates: shorter than with a device each."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

import onebit_jax
from train.core.batches import place, stream
from train.core.mesh import AXIS

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from train.core.task import Task


class Simulated(NamedTuple):
    """The results of a simulated training.

    Attributes:
      evaluations: From step to means over held-out examples by name.
      stages: From step to the steps of each stage until then, those of an optimizer
        without stages as 'every'.
      metrics: The optimizer's measures at the end.
      skipped: Steps that were skipped.
    """

    evaluations: dict[int, dict[str, float]]
    stages: dict[int, dict[str, int]]
    metrics: dict[str, float]
    skipped: int


def simulate(task: Task, workers: int, mesh: Mesh) -> Simulated:
    """Trains without checkpoints: one that is interrupted begins again.

    Args:
      task: What to train, in one phase.
      workers: How many are simulated.
      mesh: The one device.

    Returns:
      The held-out losses, and what the optimizer's state tells.
    """
    (phase,) = task.phases
    run = onebit_jax.simulated(phase.loss, phase.tx, workers, axis=AXIS)
    params, state = jax.device_put(
        run.init(task.init()), jax.NamedSharding(mesh, jax.P())
    )
    evaluate = phase.evaluation(params) if phase.evaluation else lambda params: {}
    evaluations, stages = {}, {}
    with closing(stream(phase.batches)) as batches:
        for step in range(1, phase.last + 1):
            batch = place(next(batches), mesh)
            params, state, loss = run.step(params, state, batch, np.uint32(step - 1))
            # The host prepares the next batch meanwhile, and no more than that.
            loss.block_until_ready()
            if step % phase.eval_every == 0 or step == phase.last:
                held_out = onebit_jax.local_params(params, state)
                evaluations[step] = evaluate(held_out)
                taken = jax.device_get(onebit_jax.steps_by_stage(state))
                stages[step] = {name: int(n) for name, n in taken.items()}
                stages[step] = stages[step] or {"every": step}
    metrics = {
        n: x.item() for n, x in jax.device_get(onebit_jax.metrics(state)).items()
    }
    return Simulated(evaluations, stages, metrics, metrics.get("skipped", 0))
