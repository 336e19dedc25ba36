"""Training with one optimizer: steps, measures, evaluations, checkpoints."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import numpy as np
from tqdm import tqdm

import onebit_jax
from models import SIZES
from train import record, run_folder
from train.checkpoint import Checkpoint, Checkpoints, Progress
from train.examples import stream
from train.exchange import make_exchange
from train.objective import abstract_params, init_params, training_loss
from train.optimizer import freeze_rule, learning_rate_schedule, make_optimizer
from train.program import compile_program, place
from train.record import EvalMetrics, StepMetrics
from train.sent import Sent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Any

    import grain
    import optax
    from jax.sharding import Mesh

    from models import PreTrainingBatch
    from train.config import Optimizer, PretrainConfig
    from train.data import Data
    from train.program import Program
    from train.sent import Stage
    from train.watchdog import Watchdog


def is_main_process() -> bool:
    """Whether this process is the one of many that writes and draws."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Prints a line, on one process of many."""
    if is_main_process():
        print(text, flush=True)


def train(
    config: PretrainConfig,
    data: Data,
    mesh: Mesh,
    until: int,
    begin: Callable[[], None],
    watchdog: Watchdog,
) -> None:
    """Trains, from the newest checkpoint where there is one.

    Args:
      config: The flags; their steps are those of the schedules, and their `out` is
        where the checkpoints and metrics are, or will be.
      data: What to train on.
      mesh: The workers.
      until: Steps to have trained at the end.
      begin: Called once the newest checkpoint, if there is one, has been read whole.
      watchdog: What is told of each wait for the other processes.

    Raises:
      InputError: The newest checkpoint is damaged or of another model, or there is
        none although there are metrics.
    """
    optimizer, folder = config.optimizer, config.out
    model = replace(
        SIZES[config.model], vocab_size=len(data.vocabulary), dropout=config.dropout
    )
    schedule = learning_rate_schedule(config.learning_rate, config.warmup, config.steps)
    tx = make_optimizer(
        optimizer,
        schedule,
        freeze_rule(config.freeze, config.warmup, config.steps),
        make_exchange(mesh, config.wire, config.topology),
        weight_decay=config.weight_decay,
        clip=config.clip,
    )
    loss_fn = training_loss(model, config.seed, mesh.axis_names, config.accumulate)
    run = onebit_jax.data_parallel(loss_fn, tx, mesh)
    with (
        closing(Checkpoints(folder, model, optimizer)) as checkpoints,
        closing(stream(data.training)) as batches,
    ):
        watchdog.expect("the start from a checkpoint")
        if checkpoints.exist() or record.read(folder):
            start, workers = checkpoints.restore(tx, abstract_params(model), mesh)
            if workers != mesh.size:
                say(f"{folder}: converted from {workers} workers to {mesh.size}")
            batches.set_state(start.progress.data)
            if is_main_process():
                with run_folder.writable(folder):
                    record.truncate(folder, start.progress.sent.steps)
        else:
            params, state = run.init(init_params(model, config.seed))
            start = Checkpoint(params, state, Progress(Sent(), batches.get_state()))
            watchdog.expect("the checkpoint of step 0")
            checkpoints.save(start, mesh)
        begin()
        watchdog.expect("")  # a compilation waits for nobody
        program = compile_program(run, model, start.params, start.state, data, mesh)
        say(f"{optimizer}: a worker sends {_spell_rates(program.rates)}")
        if program.host_rates:
            say(f"{optimizer}: between hosts {_spell_rates(program.host_rates)}")
        training = _Training(
            config, optimizer, folder, mesh, schedule, program, checkpoints, watchdog
        )
        training.loop(start, batches, until)
        watchdog.expect("")


def _spell_rates(rates: Mapping[Stage, int]) -> str:
    if rates["warmup"] == rates["compressed"]:
        return f"{rates['warmup']:,} bytes a step"
    return (
        f"{rates['warmup']:,} bytes a step in the warm-up and {rates['compressed']:,} "
        "in the compressed stage"
    )


@dataclass(frozen=True)
class _Training:
    config: PretrainConfig
    optimizer: Optimizer
    folder: Path
    mesh: Mesh
    schedule: optax.Schedule
    program: Program
    checkpoints: Checkpoints
    watchdog: Watchdog

    @property
    def is_virtual(self) -> bool:
        """Whether workers share one CPU, where steps in flight can block each other."""
        return self.mesh.devices.flat[0].platform == "cpu"

    def loop(
        self,
        start: Checkpoint,
        batches: grain.DatasetIterator[PreTrainingBatch],
        until: int,
    ) -> None:
        params, state, progress = start
        sent = progress.sent
        config = self.config
        logged, since = sent.steps, time.perf_counter()
        with tqdm(
            desc=self.optimizer,
            total=until,
            initial=sent.steps,
            unit="step",
            mininterval=0.5,
            disable=not is_main_process(),
        ) as bar:
            for step in range(sent.steps + 1, until + 1):
                self.watchdog.expect(f"step {step}")
                params, state, loss = self.program.step(
                    params, state, place(next(batches), self.mesh), np.uint32(step - 1)
                )
                if self.is_virtual:
                    loss.block_until_ready()
                bar.update()
                log, evaluate, save = (
                    step % every == 0 or step == until
                    for every in (
                        config.log_every,
                        config.eval_every,
                        config.checkpoint_every,
                    )
                )
                # Real devices are waited for only here.
                if log or save:
                    sent = self._count(sent, step, state)
                if log:
                    seconds = time.perf_counter() - since
                    rate = (step - logged) * config.batch / seconds
                    self._log(sent, float(loss), rate, bar)
                    logged, since = step, time.perf_counter()
                paused = time.perf_counter()
                if evaluate:
                    self.watchdog.expect(f"the evaluation after step {step}")
                    self._append(EvalMetrics(step, self.program.evaluate(params)))
                if save:
                    self.watchdog.expect(f"the checkpoint of step {step}")
                    progress = Progress(sent, batches.get_state())
                    self.checkpoints.save(
                        Checkpoint(params, state, progress), self.mesh
                    )
                since += time.perf_counter() - paused

    def _count(self, sent: Sent, step: int, state: Any) -> Sent:
        measured = jax.device_get(onebit_jax.metrics(state))
        return sent.after(
            step,
            frozen_at=int(measured.get("frozen_at", 0)),
            skipped=int(measured["skipped"]),
            rates=self.program.rates,
        )

    def _log(self, sent: Sent, loss: float, rate: float, bar: tqdm) -> None:
        self._append(
            StepMetrics(
                step=sent.steps,
                loss=loss,
                stage=sent.stage,
                sent_bytes=self.program.rates[sent.stage],
                total_sent_bytes=sent.total_bytes,
                skipped=sent.skipped,
                # A skipped step does not advance the schedule.
                learning_rate=np.asarray(
                    self.schedule(sent.steps - 1 - sent.skipped)
                ).item(),
                examples_per_second=rate,
            )
        )
        bar.set_postfix(
            {
                "loss": f"{loss:.3f}",
                "stage": sent.stage,
                "examples/s": f"{rate:.0f}",
                "MB sent": f"{sent.total_bytes / 1e6:.1f}",
            }
        )

    def _append(self, metrics: StepMetrics | EvalMetrics) -> None:
        if is_main_process():
            with run_folder.writable(self.folder):
                record.append(self.folder, metrics)
