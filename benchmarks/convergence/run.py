"""One training of `benchmarks.convergence`, which goes on where it was interrupted."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import closing
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

import onebit_jax
from benchmarks.convergence.arms import optimizer
from models import SIZES, huggingface
from train.bert.config import PretrainConfig, Size
from train.bert.data import VOCABULARY_FILE, load
from train.bert.examples import element
from train.bert.objective import abstract_params, init_params, training_loss
from train.core import checkpoint
from train.core import metrics_log as record
from train.core.checkpoint import Checkpoint, Checkpoints, Progress
from train.core.mesh import AXIS
from train.core.metrics_log import EvalMetrics
from train.core.optimizer import freeze_rule, learning_rate_schedule
from train.core.program import compile_program, place
from train.core.totals import Sent
from train.data.vocabulary import write_vocabulary

MODEL_FOLDER = "model"
_EVALUATIONS = 10

Freeze = int | Literal["auto"]


@dataclasses.dataclass(frozen=True)
class Shared:
    """What all runs have in common."""

    corpus: tuple[Path, ...] = ()
    """Text; default: the reference documentation of the running Python."""
    model: Size = "mini"
    """Size of the BERT."""
    steps: int = 1500
    """Training steps."""
    warmup_steps: int = 150
    """Steps in which the learning rate rises."""
    batch: int = 32
    """Sequences a step, of all workers together."""
    seq: int = 64
    """Tokens a sequence."""


class Case(NamedTuple):
    """What a run is asked for.

    Attributes:
      arm: Name of the optimizer.
      learning_rate: The schedule's peak.
      seed: Decides the parameters, the samples and their order.
      workers: How many share a batch.
      freeze: Steps before the variance is frozen; 'auto' once it is stable.
    """

    arm: str
    learning_rate: float
    seed: int
    workers: int
    freeze: Freeze

    @property
    def name(self) -> str:
        """The name of its folder."""
        arm = "".join(c if c.isalnum() else "-" for c in self.arm)
        return f"{arm}-{self.learning_rate:g}-{self.seed}-{self.workers}-{self.freeze}"


class Run(NamedTuple):
    """A training that has ended.

    Attributes:
      case: What it was asked for.
      frozen_at: The step at which the variance was frozen; 0 for never.
      eval_losses: From step to held-out loss, in nats.
      sent_bytes: Bytes that a worker sent in all.
    """

    case: Case
    frozen_at: int
    eval_losses: dict[int, float]
    sent_bytes: int

    @property
    def loss(self) -> float:
        """The held-out loss at the last step, in nats."""
        return self.eval_losses[max(self.eval_losses)]


def use_devices(count: int) -> None:
    """Has this process, where JAX has not begun yet, as many virtual devices."""
    jax.config.update("jax_num_cpu_devices", count)


def train(shared: Shared, case: Case, folder: Path, tokens: Path) -> Run:
    """Trains, from the newest checkpoint where there is one.

    Args:
      shared: What all runs have in common.
      case: What this one is asked for.
      folder: Where its checkpoints are meanwhile, and its weights afterwards, in
        Hugging Face's layout.
      tokens: A folder that keeps the corpus as word pieces.

    Returns:
      The run.
    """
    mesh = jax.make_mesh(
        (case.workers,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
    )
    flags = PretrainConfig(
        corpus=shared.corpus,
        batch=shared.batch,
        seq=shared.seq,
        seed=case.seed,
        tokens=tokens,
    )
    data = load(flags, folder)
    model = dataclasses.replace(
        SIZES[shared.model], vocab_size=len(data.vocabulary), dropout=0.0
    )
    schedule = learning_rate_schedule(
        case.learning_rate, shared.warmup_steps, shared.steps
    )
    rule = freeze_rule(case.freeze, shared.warmup_steps, shared.steps)
    tx = optimizer(case.arm, schedule, rule)
    run = onebit_jax.data_parallel(training_loss(model, case.seed), tx, mesh)
    with closing(Checkpoints(folder, model, case.arm)) as checkpoints:
        if checkpoints.exist():
            begun, _ = checkpoints.restore(tx, abstract_params(model), mesh)
        else:
            start = run.init(init_params(model, case.seed))
            begun = Checkpoint(*start, Progress(Sent(), {}))
        params, state, progress = begun
        record.truncate(folder, progress.sent.steps)
        program = compile_program(run, model, params, state, data, mesh)
        every = max(1, shared.steps // _EVALUATIONS)
        for step in tqdm(
            range(progress.sent.steps + 1, shared.steps + 1),
            desc=case.name,
            total=shared.steps,
            initial=progress.sent.steps,
            mininterval=10,
        ):
            batch = place(element(data.training, step - 1), mesh)
            params, state, loss = program.step(
                params, state, batch, np.uint32(step - 1)
            )
            loss.block_until_ready()
            if step % every == 0 or step == shared.steps:
                record.append(folder, EvalMetrics(step, program.evaluate(params)))
                progress = Progress(Sent(step), {})
                checkpoints.save(Checkpoint(params, state, progress), mesh)
    frozen_at = int(onebit_jax.metrics(state).get("frozen_at", 0))
    sent = Sent().after(
        shared.steps,
        frozen_at=frozen_at,
        skipped=0,
        rates=program.rates,
    )
    weights = folder / MODEL_FOLDER
    huggingface.write(weights, model, jax.device_get(params), "BertForPreTraining")
    write_vocabulary(weights / VOCABULARY_FILE, data.vocabulary)
    shutil.rmtree(folder / checkpoint.FOLDER)
    losses = {line["step"]: line["eval_loss"] for line in record.read(folder)}
    return Run(case, frozen_at, losses, sent.total_bytes)
