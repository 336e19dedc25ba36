"""One training of `benchmarks.convergence`, which goes on where it was interrupted."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Literal, NamedTuple

import jax
from jax.sharding import Mesh

from benchmarks.convergence.arms import optimizer
from models import SIZES, BertConfig, huggingface
from models.config import Size
from train.bert.config import PretrainConfig
from train.bert.data import VOCABULARY_FILE, load
from train.bert.objective import init_params, training_loss
from train.bert.task import evaluation
from train.core import checkpoint, metrics_log
from train.core.command import watched
from train.core.flags import TrainingFlags
from train.core.loop import train as run_loop
from train.core.mesh import make_mesh
from train.core.optimizer import freeze_rule, learning_rate_schedule
from train.core.processes.distributed import Cluster
from train.core.task import Params, Phase, Task
from train.data.vocabulary import write_vocabulary

MODEL_FOLDER = "model"
_EVALUATIONS = 10

Freeze = int | Literal["auto"]


@dataclasses.dataclass(frozen=True)
class Shared:
    """Settings that all runs have in common."""

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
    """Settings of one run.

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


def train(
    shared: Shared,
    case: Case,
    folder: Path,
    tokens: Path,
    size: BertConfig | None = None,
) -> Run:
    """Trains, from the newest checkpoint where there is one.

    Args:
      shared: What all runs have in common.
      case: What this one is asked for.
      folder: Where its checkpoints are meanwhile, and its weights afterwards, in
        Hugging Face's layout.
      tokens: A folder that keeps the corpus as word pieces.
      size: The model's; None for the one of that name.

    Returns:
      The run.
    """
    mesh = make_mesh(case.workers, "flat")
    every = max(1, shared.steps // _EVALUATIONS)
    task = make_task(shared, case, folder, tokens, mesh, size, every)
    flags = TrainingFlags(out=folder, log_every=every, checkpoint_every=every)
    with watched(Cluster.timeout) as watchdog:
        totals = run_loop(task, flags, shared.steps, mesh, watchdog)
    shutil.rmtree(folder / checkpoint.FOLDER)
    lines = metrics_log.read(folder)
    losses = {x["step"]: x["eval_loss"] for x in lines if "eval_loss" in x}
    first, *later = totals.by_stage.values()
    return Run(case, first if any(later) else 0, losses, totals.total_bytes)


def make_task(
    shared: Shared,
    case: Case,
    folder: Path,
    tokens: Path,
    mesh: Mesh,
    size: BertConfig | None,
    eval_every: int,
) -> Task:
    """The training of a case, which leaves its weights in the end.

    Args:
      shared: What all runs have in common.
      case: What this one is asked for.
      folder: Its folder.
      tokens: A folder that keeps the corpus as word pieces.
      mesh: The workers.
      size: The model's; None for the one of that name.
      eval_every: Steps between evaluations.

    Returns:
      The task.
    """
    flags = PretrainConfig(
        corpus=shared.corpus,
        batch=shared.batch,
        seq=shared.seq,
        seed=case.seed,
        tokens=tokens,
    )
    data = load(flags, folder)
    model = dataclasses.replace(
        size or SIZES[shared.model], vocab_size=len(data.vocabulary), dropout=0.0
    )
    steps = shared.warmup_steps, shared.steps
    schedule = learning_rate_schedule(case.learning_rate, *steps)
    rule = freeze_rule(case.freeze, *steps)

    def finish(params: Params) -> None:
        weights = folder / MODEL_FOLDER
        huggingface.write(weights, model, jax.device_get(params), "BertForPreTraining")
        write_vocabulary(weights / VOCABULARY_FILE, data.vocabulary)

    phase = Phase(
        loss=training_loss(model, case.seed),
        batches=data.training,
        batch=shared.batch,
        tx=optimizer(case.arm, schedule, rule),
        schedule=schedule,
        last=shared.steps,
        evaluation=evaluation(model, data, mesh, flags.eval_sequences),
        eval_every=eval_every,
    )
    return Task(
        name=case.name,
        model={**dataclasses.asdict(model), "arm": case.arm},
        init=lambda: init_params(model, case.seed),
        phases=[phase],
        finish=finish,
    )
