"""The training loop of all tasks: steps, measures, evaluations, checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

import onebit_jax
from train.core import metrics_log, picture
from train.core.batches import element, place, stream
from train.core.checkpoint import Checkpoint, Checkpoints, Progress, latest_step
from train.core.errors import writable
from train.core.metrics_log import EvalMetrics, StepMetrics
from train.core.output import is_main_process, say
from train.core.processes.distributed import meet
from train.core.processes.session import uninterrupted
from train.core.totals import Totals, count, stage_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

    import grain
    from jax.sharding import Mesh

    from train.core.flags import TrainingFlags
    from train.core.processes.watchdog import Watchdog
    from train.core.task import Evaluation, Params, Phase, Task

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

    Returns:
      Steps and bytes at the end.

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
    task.finish(loop.take().mean_params)
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


class _Program(NamedTuple):
    """A compiled step, its evaluation, and the bytes that it sends by stage."""

    step: Callable[..., tuple[Params, Any, jax.Array]]
    evaluate: Evaluation | None
    rates: dict[str, int]


class _Due(NamedTuple):
    """The tasks that are due after a step."""

    log: bool
    evaluate: bool
    save: bool


class _Loop:
    """A training between two phases: its newest checkpoint, and what it needs."""

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
        self._held_out: dict[str, float] = {}
        self._measures: dict[str, Any] = {}
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
        if not (self.checkpoints.exist() or metrics_log.read(folder)):
            return
        # One at the end of a phase has the state of that phase.
        ended = sum(phase.last < self.checkpoints.latest() for phase in phases)
        tx = phases[min(ended, len(phases) - 1)].tx
        params = jax.eval_shape(self.task.init)
        self._reached, workers = self.checkpoints.restore(tx, params, self.mesh)
        self.totals = self._reached.progress.totals
        lost = [x for x in metrics_log.read(folder) if x["step"] > self.totals.steps]
        if lost:
            say(
                f"{folder}: goes on from the checkpoint of step {self.totals.steps:,}, "
                f"and trains again the steps up to {lost[-1]['step']:,}, of which "
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
            program = self._compile(phase, run, begun)
            self._reached = self._steps(phase, program, begun, batches, last)
        clipped = float(self._measures.get("clipped_share", 0.0))
        if clipped > MUCH_CLIPPED:
            share = f"{clipped:.0%}".replace("%", " %")
            say(
                f"{share} of the steps were clipped by --clip {self.flags.clip:g} (the "
                f"last step's norm was {self._measures['worker_norm']:.3g}); if Adam "
                "was clipped less, give a new run a larger one."
            )
        # Of the axes the first is that of the hosts, or the only one.
        compressing = self.mesh.devices.shape[0]
        advice = ALONE if compressing == 1 else phase.advice
        if advice and not self._measures.get("compressed", 1):
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
            batches.set_state(reached.progress.data)
            return reached
        is_new = self._reached is None
        params = self.task.init() if is_new else self.take().mean_params
        progress = Progress(self.totals.at_phase_start(), batches.get_state())
        begun = Checkpoint(*run.init(params), progress)
        if is_new:
            self._save(begun)
        return begun

    def _compile(
        self, phase: Phase, run: onebit_jax.DataParallel, begun: Checkpoint
    ) -> _Program:
        """The phase's programs; says what they send."""
        name, mesh = self.task.name, self.mesh
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        wait = ", a minute or two on a CPU" if on_cpu else ""
        say(f"{name}: compiling the training step{wait}")
        self.watchdog.expect("")  # a compilation may take any time
        batch = place(element(phase.batches, 0), mesh)
        arguments = begun.params, begun.state, batch, np.uint32(0)
        step = run.step.lower(*arguments).compile()
        traffic = onebit_jax.traffic(step, mesh)
        stages = onebit_jax.steps_by_stage(begun.state)
        rates = stage_rates(traffic, stages)
        say(f"{name}: a worker sends {_spelled(rates)}")
        if len(mesh.axis_names) > 1:
            axis = mesh.axis_names[0]
            between = stage_rates(traffic, stages, axis)
            say(f"{name}: between {axis}s {_spelled(between)}")
        onebit_jax.metrics(begun.state)  # is compiled by itself, at its first call
        evaluate = phase.evaluation(begun.params) if phase.evaluation else None
        # Steps are not to wait for a process that still compiles: their time is
        # limited, and gloo gives those that meet in a new group of devices 30 s.
        meet()
        return _Program(step, evaluate, rates)

    def _steps(
        self,
        phase: Phase,
        program: _Program,
        begun: Checkpoint,
        batches: grain.DatasetIterator[Any],
        last: int,
    ) -> Checkpoint:
        params, state, progress = begun
        self.totals = progress.totals
        losses: deque[jax.Array] = deque()
        speed, ahead = _Speed(self.totals.steps), _ahead(self.mesh)
        bar = self._bar(last)
        for step in bar:
            self.watchdog.expect(f"step {step - len(losses)}")
            batch = place(next(batches), self.mesh)
            params, state, loss = program.step(
                params, state, batch, np.uint32(step - 1)
            )
            losses.append(loss)
            if len(losses) > ahead:
                losses.popleft().block_until_ready()
            due = self._due(phase, step, last)
            if due.log or due.save:
                self._measure(step, state, program.rates)
            if due.log:
                rate = phase.batch * speed.steps_per_second(step)
                self._log(phase, program.rates, float(loss), rate, bar)
            if due.evaluate or due.save:
                loss.block_until_ready()  # the time of steps in flight counts
            with speed.paused():
                if due.evaluate:
                    self._evaluate(program, step, params, state)
                if due.save:
                    progress = Progress(self.totals, batches.get_state())
                    self._save(Checkpoint(params, state, progress))
        return Checkpoint(params, state, progress)

    def _due(self, phase: Phase, step: int, last: int) -> _Due:
        """The tasks that are due after a step; all of them after the last."""
        every = self.flags.log_every, phase.eval_every, self.flags.checkpoint_every
        log, evaluate, save = (step % n == 0 or step == last for n in every)
        # The device is waited for where something is evaluated.
        return _Due(log, evaluate and phase.evaluation is not None, save)

    def _evaluate(self, program: _Program, step: int, params: Any, state: Any) -> None:
        if program.evaluate:
            self.watchdog.expect(f"the evaluation after step {step}")
            held_out = program.evaluate(onebit_jax.local_params(params, state))
            self._held_out = held_out
            self._append(EvalMetrics(step, held_out))

    def _save(self, newest: Checkpoint) -> None:
        self.watchdog.expect(f"the checkpoint of step {newest.progress.totals.steps}")
        with uninterrupted():  # half of one would be lost
            self.checkpoints.save(newest, self.mesh)

    def _bar(self, last: int) -> tqdm:
        """A progress bar over the numbers of the steps to come."""
        done = self.totals.steps
        return tqdm(
            range(done + 1, last + 1),
            desc=self.task.name,
            total=last,
            initial=done,
            unit="step",
            mininterval=0.5,
            disable=not is_main_process(),
        )

    def _measure(self, step: int, state: Any, rates: dict[str, int]) -> None:
        """Counts steps and bytes, and asks the state for its measures."""
        measured = onebit_jax.metrics(state), onebit_jax.steps_by_stage(state)
        self._measures, taken = jax.device_get(measured)
        skipped = int(self._measures.get("skipped", 0))
        self.totals = count(self.totals, step, taken, skipped, rates)

    def _log(
        self, phase: Phase, rates: dict[str, int], loss: float, rate: float, bar: tqdm
    ) -> None:
        totals = self.totals
        self._append(
            StepMetrics(
                step=totals.steps,
                loss=loss,
                stage=totals.stage,
                sent_bytes=rates[totals.stage],
                total_sent_bytes=totals.total_bytes,
                skipped=totals.total_skipped,
                # A skipped step does not advance the schedule.
                learning_rate=np.asarray(phase.schedule(totals.taken - 1)).item(),
                examples_per_second=rate,
                optimizer={name: x.item() for name, x in self._measures.items()},
            )
        )
        bar.set_postfix(
            {
                "loss": f"{loss:.3f}",
                "stage": totals.stage,
                "examples/s": f"{rate:.0f}",
                "MB sent": f"{totals.total_bytes / 1e6:.1f}",
                **{f"held-out {n}": f"{x:.3f}" for n, x in self._held_out.items()},
            }
        )

    def _append(self, metrics: StepMetrics | EvalMetrics) -> None:
        if is_main_process():
            folder = self.flags.out
            with writable(folder):
                metrics_log.append(folder, metrics)


class _Speed:
    """Steps a second since the last time that it was asked for, without pauses."""

    def __init__(self, step: int):
        self._step, self._since = step, time.perf_counter()

    def steps_per_second(self, step: int) -> float:
        """The speed up to a step, and from there anew."""
        seconds = time.perf_counter() - self._since
        steps, self._step = step - self._step, step
        self._since = time.perf_counter()
        return steps / seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time that does not count."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before


def _ahead(mesh: Mesh) -> int:
    """Steps in flight: none where workers share a CPU and can block each other's."""
    # Few elsewhere, so that a step's time is counted from about its own beginning.
    return 0 if mesh.devices.flat[0].platform == "cpu" else AHEAD


def _spelled(rates: dict[str, int]) -> str:
    (first, size), *others = rates.items()
    text = f"{size:,} bytes a step"
    if all(other == size for _, other in others):
        return text
    more = (f", {other:,} of {name}" for name, other in others)
    return f"{text} of the stage {first}" + "".join(more)
