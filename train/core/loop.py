"""Training with one optimizer: steps, measures, evaluations, checkpoints."""

from __future__ import annotations

import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import numpy as np
from tqdm import tqdm

import onebit_jax
from models import SIZES
from train.bert.examples import stream
from train.bert.objective import abstract_params, init_params, training_loss
from train.core import metrics_log as record
from train.core.checkpoint import Checkpoint, Checkpoints, Progress
from train.core.command import (
    is_main_process,
    say,
    say_if_never_compressed,
    say_if_not_compressed,
    say_if_skipped,
)
from train.core.errors import writable
from train.core.exchange import make_exchange
from train.core.metrics_log import EvalMetrics, StepMetrics
from train.core.optimizer import freeze_rule, learning_rate_schedule, make_optimizer
from train.core.program import compile_program, place
from train.core.totals import Sent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    import grain
    import optax
    from jax.sharding import Mesh

    from models import BertConfig, PreTrainingBatch
    from train.bert.config import Optimizer, PretrainConfig
    from train.bert.data import Data
    from train.bert.phases import Phase
    from train.core.program import Program
    from train.core.totals import Stage
    from train.core.watchdog import Watchdog


AHEAD = 2
"""Steps that a device has to do while the host prepares the next."""


def train(
    config: PretrainConfig,
    data: Sequence[Data],
    mesh: Mesh,
    until: int,
    begin: Callable[[], None],
    watchdog: Watchdog,
) -> None:
    """Trains, from the newest checkpoint where there is one.

    Args:
      config: The flags; their steps are those of the schedules, and their `out` is
        where the checkpoints and metrics are, or will be.
      data: What to train on in each phase.
      mesh: The workers.
      until: Steps to have trained at the end; where they are more than those of all
        phases, the last goes on.
      begin: Called once the newest checkpoint, if there is one, has been read whole.
      watchdog: What is told of each wait for the other processes.

    Raises:
      InputError: The newest checkpoint is damaged or of another model, or there is
        none although there are metrics.
    """
    folder, phases = config.out, config.phases
    model = replace(
        SIZES[config.model],
        vocab_size=len(data[0].vocabulary),
        **config.model_options,
    )
    with closing(Checkpoints(folder, model, config.optimizer)) as checkpoints:
        reached = None
        watchdog.expect("the start from a checkpoint")
        if checkpoints.exist() or record.read(folder):
            # One at the end of a phase has the state of that phase.
            earlier = [p for p in phases if p.earlier_steps < checkpoints.latest()]
            tx, _ = _optimizer(config, [phases[0], *earlier][-1], mesh)
            reached, workers = checkpoints.restore(tx, abstract_params(model), mesh)
            if workers != mesh.size:
                say(f"{folder}: converted from {workers} workers to {mesh.size}")
            if is_main_process():
                with writable(folder):
                    record.truncate(folder, reached.progress.sent.steps)
            begin()
        for phase, own in zip(phases, data, strict=True):
            last = phase.last if phase.last < config.total_steps else until
            if reached and reached.progress.sent.steps >= last:
                continue
            if len(phases) > 1:
                say(f"sequences of {phase.seq} tokens to step {last:,}")
            tx, schedule = _optimizer(config, phase, mesh)
            loss_fn = training_loss(
                model, config.seed, mesh.axis_names, phase.accumulate
            )
            run = onebit_jax.data_parallel(loss_fn, tx, mesh)
            with closing(stream(own.training)) as batches:
                is_new = reached is None
                start = _start(phase, run, batches, reached, model, config.seed)
                reached = None  # its arrays need no memory while this phase trains
                if is_new:
                    watchdog.expect("the checkpoint of step 0")
                    checkpoints.save(start, mesh)
                    begin()
                watchdog.expect("")  # a compilation waits for nobody
                program = compile_program(
                    run, model, start.params, start.state, own, mesh
                )
                _say_rates(config.optimizer, program)
                flag = f"{phase.flags}freeze-step"
                if config.optimizer == "onebit_adam":
                    own_steps = last - phase.earlier_steps
                    say_if_never_compressed(flag, phase.freeze, own_steps)
                training = _Training(
                    config, phase, mesh, schedule, program, checkpoints, watchdog
                )
                reached = training.loop(start, batches, last)
                watchdog.expect("")
                if config.optimizer == "onebit_adam" and phase.freeze == "auto":
                    say_if_not_compressed(flag, reached.progress.sent)
        if reached:
            say_if_skipped(reached.progress.sent)


def _optimizer(
    config: PretrainConfig, phase: Phase, mesh: Mesh
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    schedule = learning_rate_schedule(
        phase.learning_rate,
        phase.warmup,
        phase.steps,
        decay_rate=phase.decay_rate,
        decay_every=phase.decay_every,
    )
    tx = make_optimizer(
        config.optimizer,
        schedule,
        freeze_rule(phase.freeze, phase.warmup, phase.steps),
        make_exchange(mesh, config.wire, config.topology),
        weight_decay=config.weight_decay,
        clip=config.clip,
    )
    return tx, schedule


def _start(
    phase: Phase,
    run: onebit_jax.DataParallel,
    batches: grain.DatasetIterator[PreTrainingBatch],
    reached: Checkpoint | None,
    model: BertConfig,
    seed: int,
) -> Checkpoint:
    """Where the phase goes on, or its own new start from the parameters before it."""
    if reached and reached.progress.sent.steps > phase.earlier_steps:
        batches.set_state(reached.progress.data)
        return reached
    sent = reached.progress.sent.at_phase_start() if reached else Sent()
    params, state = run.init(reached.params if reached else init_params(model, seed))
    return Checkpoint(params, state, Progress(sent, batches.get_state()))


def _say_rates(optimizer: Optimizer, program: Program) -> None:
    say(f"{optimizer}: a worker sends {_spell_rates(program.rates)}")
    if program.host_rates:
        say(f"{optimizer}: between hosts {_spell_rates(program.host_rates)}")


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
    phase: Phase
    mesh: Mesh
    schedule: optax.Schedule
    program: Program
    checkpoints: Checkpoints
    watchdog: Watchdog

    @property
    def ahead(self) -> int:
        """Steps that may be in flight behind the one that is waited for.

        None where workers share a CPU: there they can block each other. Elsewhere few,
        so that what a step may take is counted from about its own start.
        """
        return 0 if self.mesh.devices.flat[0].platform == "cpu" else AHEAD

    def loop(
        self,
        start: Checkpoint,
        batches: grain.DatasetIterator[PreTrainingBatch],
        last: int,
    ) -> Checkpoint:
        """Trains to a step, where there is a checkpoint, which is returned."""
        params, state, progress = start
        sent = progress.sent
        config = self.config
        logged, since = sent.steps, time.perf_counter()
        with tqdm(
            desc=config.optimizer,
            total=last,
            initial=sent.steps,
            unit="step",
            mininterval=0.5,
            disable=not is_main_process(),
        ) as bar:
            losses: deque[jax.Array] = deque()
            for step in range(sent.steps + 1, last + 1):
                self.watchdog.expect(f"step {step - len(losses)}")
                params, state, loss = self.program.step(
                    params, state, place(next(batches), self.mesh), np.uint32(step - 1)
                )
                losses.append(loss)
                if len(losses) > self.ahead:
                    losses.popleft().block_until_ready()
                bar.update()
                log, evaluate, save = (
                    step % every == 0 or step == last
                    for every in (
                        config.log_every,
                        config.eval_every,
                        config.checkpoint_every,
                    )
                )
                if log or save:
                    sent = self._count(sent, step, state)
                if log:
                    seconds = time.perf_counter() - since
                    rate = (step - logged) * self.phase.batch / seconds
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
        return Checkpoint(params, state, progress)

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
                skipped=sent.total_skipped,
                # A skipped step does not advance the schedule.
                learning_rate=np.asarray(self.schedule(sent.taken - 1)).item(),
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
            with writable(self.config.out):
                record.append(self.config.out, metrics)
