"""A training whose workers one device simulates: shorter than with a device each."""

from __future__ import annotations

import json
import math
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

import onebit_jax
from benchmarks.convergence.arms import stage_bytes
from benchmarks.convergence.runs import Run
from train.core.batches import place, stream
from train.core.mesh import AXIS
from train.core.totals import Totals, count

if TYPE_CHECKING:
    from pathlib import Path

    from jax.sharding import Mesh

    from benchmarks.convergence.plan import Options
    from benchmarks.convergence.runs import Case
    from train.core.task import Task


class Simulated(NamedTuple):
    """A simulated training after some of its steps.

    Attributes:
      step: How many.
      params: The parameters.
      state: The optimizer's state.
      evaluations: From step to means over held-out examples by name.
      taken: From the step of each evaluation to the steps taken of each stage until
        then, without those that were skipped; empty for an optimizer without stages.
    """

    step: int
    params: Any
    state: Any
    evaluations: dict[int, dict[str, float]]
    taken: dict[int, dict[str, int]]


def simulate(task: Task, workers: int, mesh: Mesh, file: Path, case: Case) -> Simulated:
    """Trains, from the last evaluation where an earlier call was interrupted.

    Args:
      task: What to train, in one phase.
      workers: How many are simulated.
      mesh: The one device.
      file: Where the training is saved at each evaluation.
      case: What is trained.

    Returns:
      The training at its end.
    """
    (phase,) = task.phases
    run = onebit_jax.simulated(phase.loss, phase.tx, workers, axis=AXIS)
    everywhere = jax.NamedSharding(mesh, jax.P())
    params, state = jax.device_put(run.init(task.init()), everywhere)
    begun = Simulated(0, params, state, {}, {})
    first, params, state, evaluations, taken = _restored(file, case, begun)
    del begun  # whose buffers the first step takes
    evaluate = phase.evaluation(params) if phase.evaluation else lambda params: {}
    with closing(stream(phase.batches[first:])) as batches:
        for step in range(first + 1, phase.last + 1):
            batch = place(next(batches), mesh)
            params, state, loss = run.step(params, state, batch, np.uint32(step - 1))
            # The host prepares the next batch meanwhile, and no more than that.
            loss.block_until_ready()
            if step % phase.eval_every and step != phase.last:
                continue
            evaluations[step] = evaluate(params)
            by_stage = onebit_jax.steps_by_stage(state).items()
            taken[step] = {name: int(n) for name, n in by_stage}
            if step < phase.last:
                _save(file, case, Simulated(step, params, state, evaluations, taken))
    return Simulated(phase.last, params, state, evaluations, taken)


def run_of(
    case: Case, options: Options, task: Task, made: Simulated, workers: int
) -> Run:
    """A simulated training that has ended, as a study keeps it."""
    told = jax.device_get(onebit_jax.metrics(made.state))
    metrics = jax.tree.map(lambda x: x.item(), told)
    skipped = metrics.get("skipped", 0)
    rates = stage_bytes(options, jax.eval_shape(task.init), workers, AXIS)
    totals, stages = Totals(), {}
    for step, taken in made.taken.items():
        totals = count(totals, step, taken, skipped, rates)
        stages[step] = dict(totals.by_stage)
    return Run(
        case=case,
        options=dict(options),
        evaluations={
            step: {n: x if math.isfinite(x) else None for n, x in means.items()}
            for step, means in made.evaluations.items()
        },
        frozen_at=int(metrics.get("frozen_at", 0)),
        sent_bytes=totals.total_bytes,
        skipped=skipped,
        metrics=metrics,
        rates=rates,
        stages=stages,
    )


def _save(file: Path, case: Case, now: Simulated) -> None:
    """Saves a case's training, whole or not at all."""
    leaves = jax.device_get(jax.tree.leaves((now.params, now.state)))
    kept = {name: getattr(now, name) for name in ("step", "evaluations", "taken")}
    about = {"case": case, **kept}
    new = file.with_suffix(".new")
    with new.open("wb") as output:
        np.savez(output, *leaves, about=json.dumps(about))
    new.replace(file)


def _restored(file: Path, case: Case, first: Simulated) -> Simulated:
    """The training that was saved, or its first moment where another case was saved."""
    if not file.exists():
        return first
    with np.load(file) as saved:
        about = json.loads(str(saved["about"]))
        if about["case"] != list(case):
            return first
        leaves, structure = jax.tree.flatten((first.params, first.state))
        arrays = [
            jax.device_put(saved[f"arr_{i}"], leaf.sharding)
            for i, leaf in enumerate(leaves)
        ]
    params, state = jax.tree.unflatten(structure, arrays)
    by_step = (
        {int(step): x for step, x in about[name].items()}
        for name in ("evaluations", "taken")
    )
    return Simulated(about["step"], params, state, *by_step)
