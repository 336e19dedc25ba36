"""A study of what compressed optimizers learn beside Adam, from its plan.

    python -m benchmarks.convergence --plan docs/studies/NAME.toml

The plan says the protocol: tasks, the grid that Adam is tuned on, arms, rounds of
seeds and the rule of decision; commit it before its runs. Each run that has ended is
kept in `NAME.json` beside it and not trained again; `NAME.md` and `NAME.png` are made
of that. A study that was interrupted goes on; runs that had not ended begin again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from benchmarks.convergence.picture import write_picture
from benchmarks.convergence.plan import read_plan
from benchmarks.convergence.pool import Pool
from benchmarks.convergence.report import write_page
from benchmarks.convergence.runs import Store
from benchmarks.convergence.study import wanted
from benchmarks.convergence.tasks import read_flags
from benchmarks.convergence.training import Training, train_case
from train.core.processes.session import one_sentence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.convergence.plan import Study
    from benchmarks.convergence.pool import Answer
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


class Trainer(Protocol):
    """A trainer of several cases at a time; see `benchmarks.convergence.pool.Pool`."""

    @property
    def has_idle(self) -> bool:
        """True if one more can be trained."""
        ...

    @property
    def in_work(self) -> list[Training]:
        """Those that are trained."""
        ...

    def submit(self, item: Training, /) -> None:
        """Begins one."""
        ...

    def take(self) -> Answer[Training, Run]:
        """Waits for the next that has ended."""
        ...


def main(config: Config) -> None:
    """Trains what the JSON lacks, and writes the page after each run."""
    study = read_plan(config.plan)
    with one_sentence():
        for task in study.tasks.values():
            read_flags(task)
    with _alone(config.runs / config.plan.stem):
        store = Store(config.plan.with_suffix(".json"), study)
        _report(config.plan, study, store)
        if wanted(study, store.runs):
            programs = config.runs / "programs"
            with Pool(train_case, config.jobs, programs) as pool:
                complete(study, config.plan, config.runs, store, pool)
            _report(config.plan, study, store)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the folder of a study's unfinished runs, until this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SystemExit(
                f"A study is running in {folder}: wait for its end, or stop it."
            ) from error
        yield


def _report(file: Path, study: Study, store: Store) -> None:
    write_page(file, study, store.runs)
    write_picture(file, study, store.runs)


def complete(
    study: Study, file: Path, runs: Path, store: Store, trainer: Trainer
) -> None:
    """Trains what a study lacks.

    Args:
      study: The study.
      file: Its file, beside which the page is written.
      runs: Folder for unfinished runs, and for the tokens that they share.
      store: The runs that have ended.
      trainer: What trains.
    """
    while True:
        in_work = [training.case for training in trainer.in_work]
        for case in wanted(study, store.runs):
            if trainer.has_idle and case not in in_work:
                settings = study.tasks[case.task], study.arms[case.arm]
                places = runs / file.stem, runs / "tokens"
                trainer.submit(Training(case, *settings, *places))
        if not trainer.in_work:
            return
        answer = trainer.take()
        store.add(answer.result)
        write_page(file, study, store.runs)
        print(
            f"{answer.item.case}: loss {answer.result.loss:.4f}, "
            f"{answer.seconds / 60:.1f} minutes, {len(wanted(study, store.runs))} left",
            flush=True,
        )
