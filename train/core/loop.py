"""The training loop of all tasks: steps, measures, evaluations, checkpoints."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING

import jax
import numpy as np
from tqdm import tqdm

import onebit_jax
from train.core import metrics_log, picture
from train.core.batches import element, place, stream
from train.core.checkpoint import Checkpoint, Checkpoints, exist, latest_step
from train.core.errors import writable
from train.core.mesh import HOST
from train.core.metrics_log import EvalMetrics, StepMetrics
from train.core.output import is_main_process, say
from train.core.processes.distributed import meet
from train.core.totals import Totals, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import Any

    import grain
    from jax.sharding import Mesh

    from train.core.flags import TrainingFlags
    from train.core.processes.watchdog import Watchdog
    from train.core.task import Evaluation, Phase, Task

ALONE = (
    "one worker has nobody to send signs to; give more --workers, or more hosts where "
    "each host is a worker, to compress"
)
"""The reason why a run of one worker freezes no variance."""

MUCH_CLIPPED = 0.5
"""Share of clipped steps above which it is told."""

AHEAD = 2
"""Steps in flight on the device while the host prepares the next batch."""


def train(
    task: Task,
    flags: TrainingFlags,
    until: int,
    mesh: Mesh,
    watchdog: Watchdog,
    begin: Callable[[], None] = lambda: None,
) -> Totals:
    """Trains, from the newest checkpoint where there is one.

    Args:
      task: What to train.
      flags: The folder of the run, and how often metrics and checkpoints are written.
      until: Steps to have trained at the end, of all phases together; the last phase
        takes what the others leave.
      mesh: The workers.
      watchdog: Told of each wait for the other processes.
      begin: Called before the first step, once it is certain that the newest
        checkpoint, if there is one, can be read.

    Raises:
      InputError: The newest checkpoint is damaged or of another model, or there is
        none although there are metrics.
      KeyboardInterrupt: The user has stopped it; the message says where it goes on.
    """
    folder = flags.out
    with closing(Checkpoints(folder, task.model)) as checkpoints, _stoppable(folder):
        loop = _Loop(task, flags, mesh, watchdog, checkpoints)
        loop.resume()
        begin()
        for phase in task.phases:
            last = until if phase is task.phases[-1] else phase.last
            if loop.totals.steps < last:
                loop.train(phase, last)
    watchdog.expect("")
    totals = loop.totals
    if totals.total_skipped:
        say(
            f"{totals.total_skipped:,} of {totals.steps:,} steps were skipped, as "
            "their gradients were not finite; if they are many, give a smaller "
            "--learning-rate."
        )
    if is_main_process():
        log = metrics_log.read(folder)
        say(f"{task.name}: {metrics_log.summary(log)}")
        with writable(folder):
            picture.draw(folder / picture.FILE, {task.name: log})
    # What `finish` computes may need the memory of the state.
    task.finish(loop.take().params)
    return totals


@contextlib.contextmanager
def _stoppable(folder: Path) -> Iterator[None]:
    """Says what a run that is stopped goes on from."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(
            f"stopped; --resume goes on from step {latest_step(folder):,}"
        ) from error


class _Loop:
    """A training: where it is, and what it needs to go on."""

    def __init__(
        self,
        task: Task,
        flags: TrainingFlags,
        mesh: Mesh,
        watchdog: Watchdog,
        checkpoints: Checkpoints,
    ):
        self.task, self.flags, self.mesh = task, flags, mesh
        self.watchdog, self.checkpoints = watchdog, checkpoints
        self.totals = Totals()
        # Bytes of a step of each stage, and what was measured last.
        self.rates: dict[str, int] = {}
        self.measures: dict[str, Any] = {}
        self.held_out: dict[str, float] = {}
        self._reached: Checkpoint | None = None

    def take(self) -> Checkpoint:
        """The newest checkpoint, whose arrays are held here no longer."""
        reached, self._reached = self._reached, None
        assert reached, "nothing was trained"
        return reached

    def resume(self) -> None:
        """Reads the newest checkpoint, if there is one, and cuts the metrics to it."""
        folder, phases = self.flags.out, self.task.phases
        self.watchdog.expect("the start from a checkpoint")
        log = metrics_log.read(folder)
        if not (exist(folder) or log):
            return
        # One at the end of a phase has the state of that phase.
        ended = sum(phase.last < latest_step(folder) for phase in phases)
        tx = phases[min(ended, len(phases) - 1)].tx
        params = jax.eval_shape(self.task.init)
        self._reached, workers = self.checkpoints.restore(tx, params, self.mesh)
        self.totals = self._reached.totals
        if log and log[-1]["step"] > self.totals.steps:
            say(
                f"{folder}: goes on from the checkpoint of step {self.totals.steps:,}, "
                f"and trains again the steps up to {log[-1]['step']:,}, of which "
                f"{metrics_log.FILE} tells"
            )
        if workers != self.mesh.size:
            say(f"{folder}: converted from {workers} workers to {self.mesh.size}")
        if is_main_process():
            with writable(folder):
                metrics_log.truncate(folder, self.totals.steps)

    def train(self, phase: Phase, last: int) -> None:
        """Trains a phase up to the step `last`; there is a checkpoint at that step."""
        if phase.title:
            say(phase.title)
        run = onebit_jax.data_parallel(phase.loss, phase.tx, self.mesh)
        with closing(stream(phase.batches)) as batches:
            begun = self._begin(phase, run, batches)
            step, evaluate = self._compile(phase, run, begun)
            self._reached = self._steps(phase, step, evaluate, begun, batches, last)
        clipped = float(self.measures.get("clipped_share", 0.0))
        if clipped > MUCH_CLIPPED:
            say(
                f"{100 * clipped:.0f} % of the steps were clipped by --clip "
                f"{self.flags.clip:g} (the last step's norm was "
                f"{self.measures['worker_norm']:.3g}); if Adam was clipped less, give "
                "a new run a larger one."
            )
        # Of the axes the first is that of the hosts, or the only one.
        advice = ALONE if self.mesh.devices.shape[0] == 1 else phase.advice
        if advice and not self.measures.get("compressed", 1):
            steps = f"{self.totals.steps:,}"
            say(f"the variance was not frozen up to step {steps}: {advice}.")

    def _begin(
        self,
        phase: Phase,
        run: onebit_jax.DataParallel,
        batches: grain.DatasetIterator[Any],
    ) -> Checkpoint:
        """The checkpoint to go on from, or the beginning of a phase."""
        if self.totals.steps > phase.earlier_steps:
            reached = self.take()
            batches.set_state(reached.data)
            return reached
        is_new = self._reached is None
        params = self.task.init() if is_new else self.take().params
        self.totals = self.totals.at_phase_start()
        begun = Checkpoint(*run.init(params), self.totals, batches.get_state())
        if is_new:
            self._save(begun)
        return begun

    def _compile(
        self, phase: Phase, run: onebit_jax.DataParallel, begun: Checkpoint
    ) -> tuple[Callable[..., Any], Evaluation | None]:
        """The phase's programs, of a step and an evaluation; says what a step sends."""
        name, mesh = self.task.name, self.mesh
        wait = ", a minute or two on a CPU" if _is_cpu(mesh) else ""
        say(f"{name}: compiling the training step{wait}")
        self.watchdog.expect("")  # a compilation may take any time
        costs = onebit_jax.stage_costs(phase.tx, begun.params, mesh.shape)
        self.rates = _rates(costs.items(), mesh)
        say(f"{name}: a worker sends {_spelled(self.rates)}")
        if mesh.shape.get(HOST, 1) > 1:
            between = ((s, [t for t in c if HOST in t.axes]) for s, c in costs.items())
            spelled = _spelled(_rates(between, mesh))
            say(f"{name}: between hosts a device sends {spelled}")
        batch = place(element(phase.batches, 0), mesh)
        arguments = begun.params, begun.state, batch, np.uint32(0)
        step = run.step.lower(*arguments).compile()
        onebit_jax.metrics(begun.state)  # is compiled by itself, at its first call
        evaluate = phase.evaluation(begun.params) if phase.evaluation else None
        # Steps are not to wait for a process that still compiles: their time is
        # limited, and gloo gives those that meet in a new group of devices 30 s.
        meet()
        return step, evaluate

    def _steps(
        self,
        phase: Phase,
        run_step: Callable[..., Any],
        evaluate: Evaluation | None,
        begun: Checkpoint,
        batches: grain.DatasetIterator[Any],
        last: int,
    ) -> Checkpoint:
        params, state, _, data = begun
        flags, logged = self.flags, self.totals.steps
        in_flight: deque[jax.Array] = deque()
        bar = tqdm(
            range(logged + 1, last + 1),
            desc=self.task.name,
            total=last,
            initial=logged,
            unit="step",
            # A file keeps every state of the bar.
            mininterval=0.5 if sys.stderr.isatty() else 30,
            disable=not is_main_process(),
        )
        since = time.perf_counter()
        for step in bar:
            self.watchdog.expect(f"step {step - len(in_flight)}")
            batch = place(next(batches), self.mesh)
            params, state, loss = run_step(params, state, batch, np.uint32(step - 1))
            in_flight.append(loss)
            if len(in_flight) > _ahead(self.mesh):
                in_flight.popleft().block_until_ready()
            every = flags.log_every, phase.eval_every, flags.checkpoint_every
            log, evaluates, save = (step % n == 0 or step == last for n in every)
            if log or save:
                self._measure(step, state)
            if log:
                seconds, number = time.perf_counter() - since, step - logged
                self._log(phase, float(loss), number * phase.batch / seconds, bar)
                since, logged = time.perf_counter(), step
            if (evaluates and evaluate) or save:
                loss.block_until_ready()  # the time of steps in flight counts
            paused = time.perf_counter()
            if evaluates and evaluate:
                self.watchdog.expect(f"the evaluation after step {step}")
                self.held_out = evaluate(params)
                self._append(EvalMetrics(step, self.held_out))
            if save:
                data = batches.get_state()
                self._save(Checkpoint(params, state, self.totals, data))
            since += time.perf_counter() - paused
        return Checkpoint(params, state, self.totals, data)

    def _measure(self, step: int, state: Any) -> None:
        """Counts steps and bytes, and asks the state for its measures."""
        measured = onebit_jax.metrics(state), onebit_jax.steps_by_stage(state)
        self.measures, taken = jax.device_get(measured)
        skipped = int(self.measures.get("skipped", 0))
        self.totals = count(self.totals, step, taken, skipped, self.rates)

    def _log(
        self, phase: Phase, loss: float, examples_per_second: float, bar: tqdm
    ) -> None:
        totals = self.totals
        self._append(
            StepMetrics(
                step=totals.steps,
                loss=loss,
                stage=totals.stage,
                sent_bytes=self.rates[totals.stage],
                total_sent_bytes=totals.total_bytes,
                skipped=totals.total_skipped,
                # A skipped step does not advance the schedule.
                learning_rate=np.asarray(phase.schedule(totals.taken - 1)).item(),
                examples_per_second=examples_per_second,
                optimizer={name: x.item() for name, x in self.measures.items()},
            )
        )
        bar.set_postfix(
            {
                "loss": f"{loss:.3f}",
                "stage": totals.stage,
                "examples/s": f"{examples_per_second:.0f}",
                "MB sent": f"{totals.total_bytes / 1e6:.1f}",
                **{f"held-out {n}": f"{x:.3f}" for n, x in self.held_out.items()},
            },
            refresh=False,  # tqdm counts the steps when it prints by itself
        )

    def _append(self, metrics: StepMetrics | EvalMetrics) -> None:
        if is_main_process():
            with writable(self.flags.out):
                metrics_log.append(self.flags.out, metrics)

    def _save(self, newest: Checkpoint) -> None:
        self.watchdog.expect(f"the checkpoint of step {newest.totals.steps}")
        self.checkpoints.save(newest, self.mesh)


def _is_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def _ahead(mesh: Mesh) -> int:
    """Steps in flight: none where workers share a CPU and can block each other's."""
    # Few elsewhere, so that a step's time is counted from about its own beginning.
    return 0 if _is_cpu(mesh) else AHEAD


def _rates(
    costs: Iterable[tuple[str, Iterable[onebit_jax.Transfer]]], mesh: Mesh
) -> dict[str, int]:
    """Bytes that a worker sends in a step of each stage."""
    return {stage: onebit_jax.sent_bytes(c, mesh.shape) for stage, c in costs}


def _spelled(rates: dict[str, int]) -> str:
    (first, size), *others = rates.items()
    text = f"{size:,} bytes a step"
    if all(other == size for _, other in others):
        return text
    more = (f", {other:,} of {name}" for name, other in others)
    return f"{text} of the stage {first}" + "".join(more)
