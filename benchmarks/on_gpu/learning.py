"""Training of a decoder: Adam beside 1-bit Adam, of workers that one device simulates.

The plan is that of a study, in `docs/studies`. Runs that have ended are kept; the one
that the time does not suffice for is saved, and goes on in a later call.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.convergence.arms import with_arm
from benchmarks.convergence.plan import read_plan
from benchmarks.convergence.runs import Store
from benchmarks.convergence.simulation import begin, go_on, restored, run_of, save
from benchmarks.convergence.study import wanted
from benchmarks.on_gpu.device import device
from benchmarks.on_gpu.record import OutOfTimeError
from benchmarks.on_gpu.run import ROOT
from train.core.mesh import make_mesh
from train.data.array_files import make_folder
from train.data.corpus import read_corpus, survey
from train.data.tokenized import EVALUATION, TRAINING, held_out_documents
from train.lm.coding import BYTES
from train.lm.config import LmConfig, check
from train.lm.task import make_task
from train.lm.windows import Data, Windows, read_windows, write_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.convergence.plan import Study, TaskPlan
    from benchmarks.convergence.runs import Case, Run
    from benchmarks.on_gpu.record import Record
    from benchmarks.on_gpu.sizes import Sizes

RUNS, STATE = "learning-runs.json", "learning-state.npz"
TO_SAVE = 5.0
"""Seconds that saving a training may take."""


@dataclasses.dataclass(frozen=True)
class Batches:
    """Batches of windows by their numbers, each epoch in an order of its own.

    Attributes:
      windows: The text.
      batch: Windows of a batch.
      seed: Decides the orders.
    """

    windows: Windows
    batch: int
    seed: int

    def __getitem__(self, step: int) -> np.ndarray:
        """The batch of a step, (B, T + 1)."""
        size = len(self.windows)
        places = range(step * self.batch, (step + 1) * self.batch)
        orders = {
            epoch: np.random.default_rng((self.seed, epoch)).permutation(size)
            for epoch in {place // size for place in places}
        }
        rows = (orders[place // size][place % size] for place in places)
        return np.stack([self.windows[int(row)] for row in rows])


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part."""
    device(sizes, record.file.parent)
    folder = record.file.parent
    study = plan_of(sizes)
    store = Store(folder / RUNS, study)
    while cases := wanted(study, store.runs):
        record.write(ended=len(store.runs), wanted=len(cases), now=str(cases[0]))
        corpus = tuple(ROOT / "docs" / name for name in sizes.corpus)
        flags = flags_of(study.tasks[cases[0].task], cases[0], folder, corpus)
        run = train(flags, study, cases[0], record)
        store.add(run)
        record.check()
    record.write(ended=len(store.runs), wanted=0)


def plan_of(sizes: Sizes) -> Study:
    """The plan; where steps are given, of the smallest decoder and one setting."""
    study = read_plan(ROOT / "docs" / "studies" / f"{sizes.study}.toml")
    if sizes.steps is None:
        return study
    small = {"--model": "nano", "--steps": str(sizes.steps), "--freeze-step": "2"}
    small |= {"--workers": "2", "--batch": "8", "--seq": "16", "--dtype": "float32"}
    tasks = {
        name: dataclasses.replace(
            task,
            flags=tuple(itertools.chain(*(_pairs(task) | small).items())),
            learning_rate=task.learning_rate[:1],
            b1=task.b1[:1],
        )
        for name, task in study.tasks.items()
    }
    rounds = tuple(dataclasses.replace(x, seeds=x.seeds[:1]) for x in study.rounds)
    # The published form is compiled in half the time.
    arms = {
        name: options
        if options["optimizer"] == "adam"
        else {**options, "lead": 0, "growth": "none", "bounded": False}
        for name, options in study.arms.items()
    }
    return dataclasses.replace(study, tasks=tasks, rounds=rounds, arms=arms)


def _pairs(task: TaskPlan) -> dict[str, str]:
    return dict(zip(task.flags[::2], task.flags[1::2], strict=True))


def flags_of(
    task: TaskPlan, case: Case, folder: Path, corpus: tuple[Path, ...] = ()
) -> LmConfig:
    """The flags of a run of `train.lm`, without its command line's reader."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    given = {
        flag.removeprefix("--").replace("-", "_"): value(text)
        for flag, text in _pairs(task).items()
    }
    flags = LmConfig(
        **given,
        learning_rate=case.learning_rate,
        seed=case.seed,
        out=folder,
        corpus=corpus,
    )
    check(flags)
    return flags


def data_of(flags: LmConfig) -> Data:
    """The text of a run, as bytes."""
    about = survey(read_corpus(flags.corpus))
    held_out = held_out_documents(about, flags.seed)
    tokens = flags.out / f"tokens-{about.fingerprint[:16]}-{flags.seed}"

    def fill(new: Path) -> None:
        write_tokens(new, read_corpus(flags.corpus), held_out, BYTES)

    make_folder(tokens, fill)
    training, evaluation = (
        read_windows(tokens, part, flags.seq) for part in (TRAINING, EVALUATION)
    )
    # Not by grain, which the machine with the GPU need not have.
    batches: list[Any] = [
        Batches(windows, flags.batch, flags.seed) for windows in (training, evaluation)
    ]
    count = min(flags.eval_sequences, len(evaluation))
    return Data(BYTES, batches[0], batches[1], count)


def train(flags: LmConfig, study: Study, case: Case, record: Record) -> Run:
    """Trains a case, from where an earlier call has saved it.

    Args:
      flags: Those of the run.
      study: The study.
      case: The case.
      record: Tells the time that is left; beside its file the training is saved.

    Returns:
      The run.

    Raises:
      OutOfTimeError: The time is over; the training is saved.
    """
    file = record.file.with_name(STATE)
    mesh, options = make_mesh(1), study.arms[case.arm]
    assert flags.workers
    task = make_task(flags, data_of(flags), mesh, flags.total_steps)
    task = with_arm(task, flags, options, case.b1, mesh.axis_names)
    first = restored(file, case, begin(task, flags.workers, mesh))
    now, batches = first, task.phases[0].batches
    later = (batches[step] for step in itertools.count(first.step))
    for now in go_on(task, flags.workers, mesh, first, later):
        if record.left < TO_SAVE and now.step < flags.steps:
            save(file, case, now)
            raise OutOfTimeError
    file.unlink(missing_ok=True)
    return run_of(case, options, task, now, flags.workers)
