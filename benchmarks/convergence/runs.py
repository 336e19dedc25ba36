"""The runs of a study that have ended, kept in a JSON beside its plan."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from train.core.text_file import replace_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from benchmarks.convergence.plan import Study, TaskPlan


class Case(NamedTuple):
    """Settings of one run.

    Attributes:
      task: Name of the task.
      arm: Name of the arm.
      learning_rate: The schedule's peak.
      b1: Decay of the momentum.
      seed: Decides the parameters, the data and their order.
    """

    task: str
    arm: str
    learning_rate: float
    b1: float
    seed: int

    def __str__(self) -> str:
        """The case in words."""
        rate, b1 = f"{self.learning_rate:g}", f"b1 {self.b1:g}"
        return f"{self.task}, {self.arm}, {rate}, {b1}, seed {self.seed}"


class Run(NamedTuple):
    """A training that has ended.

    Attributes:
      case: What it was asked for.
      options: Those of its arm.
      evaluations: From step to means over held-out examples by name, the loss in nats
        as 'loss'; None for a mean that was not finite.
      frozen_at: Steps before the variance was frozen; 0 for never.
      sent_bytes: Bytes that a worker sent in all.
      skipped: Steps skipped, for gradients that were not finite.
      metrics: The last measures of the optimizer, by name; None for one that was not
        finite.
      rates: Bytes that a worker sends in a step of each stage; none in runs of before
        they were kept.
      stages: From the step of each evaluation to the steps of each stage until then;
        likewise.
    """

    case: Case
    options: dict[str, Any]
    evaluations: dict[int, dict[str, float | None]]
    frozen_at: int
    sent_bytes: int
    skipped: int
    metrics: dict[str, float | None]
    rates: Mapping[str, int] = MappingProxyType({})
    stages: Mapping[int, Mapping[str, int]] = MappingProxyType({})

    @property
    def final(self) -> dict[str, float | None]:
        """The means at the last step, by name."""
        return self.evaluations[max(self.evaluations)]

    @property
    def loss(self) -> float:
        """The held-out loss at the last step, in nats; infinite where it diverged."""
        return self.loss_after()

    def loss_after(self, step: int | None = None) -> float:
        """The held-out loss at the step of an evaluation; None for the last step."""
        means = self.final if step is None else self.evaluations[step]
        loss = means["loss"]
        return math.inf if loss is None else loss

    def sent_by_step(self) -> dict[int, int]:
        """From the step of each evaluation to the bytes that a worker had sent then."""
        return {
            step: sum(number * self.rates[stage] for stage, number in taken.items())
            for step, taken in self.stages.items()
        }


class Store:
    """The runs of a study by their cases, kept in a JSON that need not be there yet.

    Raises:
      SystemExit: A task or an arm has changed since they were trained.
    """

    def __init__(self, file: Path, study: Study):
        self._file, self._study = file, study
        self._tasks: dict[str, dict[str, Any]] = {}
        self.runs: dict[Case, Run] = {}
        if not file.exists():
            return
        stored = json.loads(file.read_text(encoding="utf-8"))
        self._tasks = stored["tasks"]
        for name in self._tasks.keys() & study.tasks:
            now = _settings(study.tasks[name])
            if any(now.get(key) != x for key, x in self._tasks[name].items()):
                raise _changed("task", name, file)
        for values in stored["runs"]:
            run = _from_json(values)
            arm = run.case.arm
            if arm in study.arms and run.options != study.arms[arm]:
                raise _changed("arm", arm, file)
            self.runs[run.case] = run

    def add(self, run: Run) -> None:
        """Keeps a run, and writes all of them."""
        self.runs[run.case] = run
        task = run.case.task
        self._tasks[task] = _settings(self._study.tasks[task])
        runs = [_to_json(each) for each in self.runs.values()]
        text = json.dumps(
            {"tasks": self._tasks, "runs": runs}, indent=1, allow_nan=False
        )
        replace_text(self._file, text + "\n")


def _settings(task: TaskPlan) -> dict[str, Any]:
    """The settings that decide a task's runs: not its name, nor its grid."""
    settings = {**asdict(task), "flags": list(task.flags)}
    for name in ("name", "learning_rate", "b1", "tuning_seeds"):
        del settings[name]
    return settings


def _changed(kind: str, name: str, file: Path) -> SystemExit:
    return SystemExit(
        f"The {kind} {name!r} is not as it was when the runs of {file} were trained: "
        "give it another name, or remove that file."
    )


def _to_json(run: Run) -> dict[str, Any]:
    metrics = {
        name: x if x is not None and math.isfinite(x) else None
        for name, x in run.metrics.items()
    }
    changed = {"case": run.case._asdict(), "metrics": metrics}
    stages = {step: dict(taken) for step, taken in run.stages.items()}
    return {**run._asdict(), **changed, "rates": dict(run.rates), "stages": stages}


def _from_json(values: dict[str, Any]) -> Run:
    steps = {
        name: {int(step): each for step, each in values[name].items()}
        for name in ("evaluations", "stages")
        if name in values
    }
    return Run(**{**values, **steps, "case": Case(**values["case"])})
