"""What is compiled for a training: its step, its evaluation, and what they send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import onebit_jax
from train.bert.examples import element
from train.bert.objective import evaluation_loss
from train.core.mesh import HOST

if TYPE_CHECKING:
    from collections.abc import Callable

    from models import BertConfig, PreTrainingBatch
    from train.bert.data import Data
    from train.core.totals import Stage

Batch = TypeVar("Batch")

EVAL_SEQUENCES = 512
"""Held-out sequences of an evaluation, to the next whole batch."""


class Program(NamedTuple):
    """Compiled functions, and what is known of them.

    Attributes:
      step: From parameters, optimizer state, batch and number of earlier steps to new
        parameters, new state and loss; the old ones are donated.
      evaluate: From parameters to the held-out loss.
      rates: Bytes that a worker sends in a step of each stage.
      host_rates: How many of them in collectives over the hosts, where there are any.
    """

    step: Callable[[Any, Any, PreTrainingBatch, np.uint32], tuple[Any, Any, jax.Array]]
    evaluate: Callable[[Any], float]
    rates: dict[Stage, int]
    host_rates: dict[Stage, int] | None


def place(batch: Batch, mesh: Mesh) -> Batch:
    """Puts a process's part of a batch on its devices, a part of the global batch."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x), batch
    )


def compile_program(
    run: onebit_jax.DataParallel,
    model: BertConfig,
    params: Any,
    state: Any,
    data: Data,
    mesh: Mesh,
) -> Program:
    """Compiles the step once, both stages in one program, and the evaluation.

    Args:
      run: The step to compile.
      model: The model's sizes.
      params: Parameters on the mesh.
      state: The optimizer's state on the mesh.
      data: What is trained and evaluated on.
      mesh: The workers.

    Returns:
      The program.
    """
    batch = place(element(data.training, 0), mesh)
    step = run.step.lower(params, state, batch, np.uint32(0)).compile()
    traffic = onebit_jax.traffic(step, mesh)

    part = place(element(data.held_out, 0), mesh)
    loss_fn = jax.jit(evaluation_loss(model)).lower(params, part).compile()
    count = -(-EVAL_SEQUENCES // part.token_ids.shape[0])
    held_out = [place(element(data.held_out, i), mesh) for i in range(count)]

    def evaluate(params: Any) -> float:
        # One at a time: on virtual devices, programs in flight together can each hold
        # threads that another's collective waits for.
        return float(np.mean([loss_fn(params, part).item() for part in held_out]))

    def rates(axis: str | None) -> dict[Stage, int]:
        return {
            "warmup": traffic.sent_bytes("warmup", axis),
            "compressed": traffic.sent_bytes("compressed", axis),
        }

    has_hosts = HOST in mesh.axis_names
    return Program(step, evaluate, rates(None), rates(HOST) if has_hosts else None)
