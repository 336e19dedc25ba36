"""A study of what compressed optimizers learn beside Adam, from its plan.

    python -m benchmarks.convergence --plan docs/studies/NAME.toml

The plan says the protocol: tasks, the grid that Adam is tuned on, arms, rounds of
seeds and the rule of decision; commit it before its runs. Each run that has ended is
kept in `NAME.json` beside it and not trained again; `NAME.md` and `NAME.png` are made
of that. A study that was interrupted goes on, and so do its runs, each from its last
evaluation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.convergence.picture import write_picture
from benchmarks.convergence.plan import read_plan
from benchmarks.convergence.pool import processes
from benchmarks.convergence.report import write_page
from benchmarks.convergence.runs import Store
from benchmarks.convergence.study import wanted
from benchmarks.convergence.tasks import read_flags
from benchmarks.convergence.training import LOG, Training, train_case
from train.core.processes.session import one_sentence

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor, Future

    from benchmarks.convergence.plan import Study
    from benchmarks.convergence.runs import Run


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains what a plan asks for, and writes JSON, page and picture beside it."""

    plan: Path
    """The TOML file of the protocol."""
    jobs: int = dataclasses.field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Runs at a time, each on its share of the cores; default: one a core."""
    runs: Path = Path("runs/convergence")
    """Folder for the logs of unfinished runs, tokens and compiled programs."""


def main(config: Config) -> None:
    """Trains what the JSON lacks, and writes the page after each run."""
    study = read_plan(config.plan)
    with one_sentence():
        for task in study.tasks.values():
            read_flags(task)
    with _alone(config.plan):
        store = Store(config.plan.with_suffix(".json"), study)
        _report(config.plan, study, store)
        if wanted(study, store.runs):
            programs = config.runs / "programs"
            with processes(config.jobs, programs) as pool:
                complete(study, config.plan, config.runs, store, pool, config.jobs)
            _report(config.plan, study, store)


@contextlib.contextmanager
def _alone(plan: Path) -> Iterator[None]:
    """Holds a plan, beside which its results are written, until this process ends."""
    with plan.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SystemExit(
                f"The study {plan} is running: wait for its end, or stop it."
            ) from error
        yield


def _report(file: Path, study: Study, store: Store) -> None:
    write_page(file, study, store.runs)
    write_picture(file, study, store.runs)


def complete(
    study: Study, file: Path, runs: Path, store: Store, pool: Executor, jobs: int
) -> None:
    """Trains what a study lacks, and writes the page beside its file after each run.

    Raises:
      SystemExit: A run has failed; those that have ended are kept.
    """
    begun: dict[Future[Run], tuple[Training, float]] = {}
    while True:
        at_work = [training.case for training, _ in begun.values()]
        cases = [case for case in wanted(study, store.runs) if case not in at_work]
        for case in cases[: jobs - len(begun)]:
            settings = study.tasks[case.task], study.arms[case.arm]
            training = Training(case, *settings, runs / file.stem, runs / "tokens")
            begun[pool.submit(train_case, training)] = training, time.monotonic()
        if not begun:
            return
        ended, _ = wait(begun, return_when=FIRST_COMPLETED)
        # One that has failed comes after those that are to be kept.
        for future in sorted(ended, key=lambda each: each.exception() is not None):
            training, since = begun[future]
            case = training.case
            if isinstance(error := future.exception(), BrokenProcessPool):
                killed = "; ".join(str(each.case) for each, _ in begun.values())
                raise SystemExit(
                    f"a process was killed, of: {killed}; give fewer --jobs if memory "
                    "was short, and start the study again: it goes on."
                ) from error
            if error:
                raise SystemExit(
                    f"{case} has failed ({type(error).__name__}: {error}); its log is "
                    f"{training.folder / LOG}: start the study again when it is "
                    "mended, and it goes on."
                ) from error
            del begun[future]
            store.add(future.result())
            write_page(file, study, store.runs)
            minutes = (time.monotonic() - since) / 60
            print(
                f"{case}: loss {store.runs[case].loss:.4f}, {minutes:.1f} minutes, "
                f"{len(wanted(study, store.runs))} left",
                flush=True,
            )
