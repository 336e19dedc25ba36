"""One training of a study, on one device that simulates its workers."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import hashlib
import json
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from benchmarks.convergence.arms import with_arm
from benchmarks.convergence.simulation import run_of, simulate
from benchmarks.convergence.tasks import open_task, read_flags

if TYPE_CHECKING:
    from benchmarks.convergence.plan import Options, TaskPlan
    from benchmarks.convergence.runs import Case, Run

LOG, STATE = "log.txt", "state.npz"


@dataclass(frozen=True)
class Training:
    """All that a process needs to train a case.

    Attributes:
      case, task, options: The case, its task, the options of its arm.
      runs: Folder of the study's unfinished runs.
      tokens: Folder that keeps corpora as tokens, for all runs.
    """

    case: Case
    task: TaskPlan
    options: Options
    runs: Path
    tokens: Path

    @property
    def folder(self) -> Path:
        """The run's own folder, which no run of other settings or code has."""
        settings = [self.case, self.task.module, self.task.flags, dict(self.options)]
        digest = hashlib.sha256(json.dumps([*settings, code()]).encode()).hexdigest()
        return self.runs / f"{self.case.task}-{digest[:16]}"


@functools.cache
def code() -> str:
    """A digest of the code that trains: a run must not go on by another formula."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in "onebit_jax", "pallas_kernels", "models", "train":
        for file in sorted((root / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def train_case(training: Training) -> Run:
    """Trains a case; what it prints goes to a log in its folder, removed at the end."""
    folder = training.folder
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / LOG).open("a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        # Until what a killed study has left behind has ended, too.
        fcntl.flock(log, fcntl.LOCK_EX)
        try:
            run = _train(training, folder)
        except BaseException:
            traceback.print_exc()  # in the log; the study names it in one sentence
            raise
    shutil.rmtree(folder)
    # The process trains the next run, whose programs are others.
    jax.clear_caches()
    gc.collect()
    return run


def run_flags(training: Training) -> Any:
    """The flags of a run: those of its task, but for what its case and arm change."""
    case, options = training.case, training.options
    changed = ("clip", "workers", "batch", "steps")
    own = {name: options[name] for name in changed if name in options}
    if "freeze" in options:
        own["freeze_step"] = options["freeze"]
        if options["freeze"] < 1:  # a share of the steps
            steps = read_flags(training.task).phases[0].steps
            own["freeze_step"] = round(options["freeze"] * steps)
    return read_flags(
        training.task,
        learning_rate=case.learning_rate,
        seed=case.seed,
        out=training.folder,
        **own,
    )


def _train(training: Training, folder: Path) -> Run:
    case, options, flags = training.case, training.options, run_flags(training)
    task, mesh = open_task(training.task, flags, training.tokens)
    task = with_arm(task, flags, options, case.b1, mesh.axis_names)
    made = simulate(task, flags.workers, mesh, folder / STATE, case)
    return run_of(case, options, task, made, flags.workers)
