"""The order of a study: which runs can be trained now, and have not been."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING

from benchmarks.convergence.frontier import Point, hull, points
from benchmarks.convergence.runs import Case
from benchmarks.convergence.tasks import read_flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.convergence.plan import Round, Study, TaskPlan
    from benchmarks.convergence.runs import Run


def wanted(study: Study, done: Mapping[Case, Run]) -> list[Case]:
    """The cases that can be trained now and have not been, in their order.

    Those of the tuning, then those of each round whose settings and arms are known; all
    arms of a seed before the next seed, so that a study cut short compares them.
    """
    rounds = [case for each in study.rounds for case in round_cases(study, each, done)]
    cases = [*tuning_cases(study, done), *rounds]
    return [case for case in dict.fromkeys(cases) if case not in done]


def tuning_cases(study: Study, done: Mapping[Case, Run]) -> list[Case]:
    """The cases by which rates and b1 are chosen, as far as they are known.

    Of each task the baseline's, then those of the arms with an own rate.
    """
    cases = []
    for task in study.tasks.values():
        used = [
            arm
            for each in study.rounds
            if task.name in each.tasks
            for name in round_arms(study, each, done)
            for arm in (study.arms[name].get("rate_of", name), name)
        ]
        for arm in dict.fromkeys([study.baseline, *used]):
            cases += _tuning(study, task, arm, done)
    return cases


def tuned(
    study: Study, task: TaskPlan, arm: str, done: Mapping[Case, Run]
) -> tuple[float, float] | None:
    """The learning rate and the b1 that an arm runs with.

    Those of the least mean loss over the seeds of tuning; None as long as a run of the
    tuning is missing.
    """
    grid = _grid(study, task, arm, done)
    if len(grid) < 2:
        return grid[0] if grid else None
    cases = _tuning(study, task, arm, done)
    if any(case not in done for case in cases):
        return None

    def mean(setting: tuple[float, float]) -> float:
        return statistics.fmean(done[c].loss for c in cases if c[2:4] == setting)

    return min(grid, key=mean)


def round_cases(study: Study, each: Round, done: Mapping[Case, Run]) -> list[Case]:
    """The cases of a round, as far as its arms and their settings are known."""
    arms = round_arms(study, each, done)
    settings = {
        (arm, task): tuned(study, study.tasks[task], arm, done)
        for arm in arms
        for task in each.tasks
    }
    return [
        Case(task, arm, *setting, seed)
        for seed in each.seeds
        for (arm, task), setting in settings.items()
        if setting
    ]


def round_arms(study: Study, each: Round, done: Mapping[Case, Run]) -> list[str]:
    """The arms of a round; those of earlier rounds only once these are complete."""
    names = [*each.hull, *([each.best.of] if each.best else [])]
    earlier = [r for r in study.rounds if r.name in names]
    if not all(_is_complete(study, r, done) for r in earlier):
        return list(each.arms)
    best = []
    if each.best:
        cases = round_cases(study, earlier[-1], done)
        ranked = _ranked(study, earlier[-1], cases, done)
        others = study.baseline, each.best.beside
        best = [arm for arm in ranked if arm not in others][: each.best.count]
    return list(dict.fromkeys([*each.arms, *best, *of_hull(study, each, done)]))


def round_points(
    study: Study, each: Round, done: Mapping[Case, Run], beside: str = ""
) -> list[Point]:
    """Where the arms of a round stand that have run in all of its tasks.

    Beside an arm of the study, or the baseline.
    """
    runs = [done[case] for case in round_cases(study, each, done) if case in done]
    of_tasks = {task: read_flags(study.tasks[task]).workers for task in each.tasks}

    def workers(case: Case) -> int:
        return study.arms[case.arm].get("workers", of_tasks[case.task])

    return points(runs, beside or study.baseline, workers)


def of_hull(study: Study, each: Round, done: Mapping[Case, Run]) -> list[str]:
    """The arms of the hulls of a round's earlier rounds, one for each of `workers`."""
    by_workers: dict[int, list[Point]] = {}
    for earlier in study.rounds:
        if earlier.name in each.hull:
            for at in round_points(study, earlier, done):
                if at.arm in earlier.product:
                    workers = earlier.product[at.arm]["workers"]
                    by_workers.setdefault(workers, []).append(at)
    return [at.arm for found in by_workers.values() for at in hull(found)]


def _is_complete(study: Study, each: Round, done: Mapping[Case, Run]) -> bool:
    cases = round_cases(study, each, done)
    arms = round_arms(study, each, done)
    expected = len(arms) * len(each.tasks) * len(each.seeds)
    return len(cases) == expected and all(case in done for case in cases)


def _ranked(
    study: Study, each: Round, cases: Sequence[Case], done: Mapping[Case, Run]
) -> list[str]:
    """The arms of a complete round by their mean share of the baseline's loss."""

    def loss(arm: str, task: str) -> float:
        return statistics.fmean(done[c].loss for c in cases if c[:2] == (task, arm))

    def share(arm: str) -> float:
        return statistics.fmean(
            loss(arm, task) / loss(study.baseline, task) for task in each.tasks
        )

    return sorted(dict.fromkeys(case.arm for case in cases), key=share)


def _grid(
    study: Study, task: TaskPlan, arm: str, done: Mapping[Case, Run]
) -> list[tuple[float, float]]:
    """The rates and b1 that an arm is tried with; none before the baseline is tuned.

    An arm with `rate_of` has the one setting that the arm of that name is tuned to.
    """
    if arm == study.baseline:
        return list(itertools.product(task.learning_rate, task.b1))
    best = tuned(study, task, study.baseline, done)
    if best is None:
        return []
    options = study.arms[arm]
    if "rate_of" in options:
        setting = tuned(study, task, options["rate_of"], done)
        return [setting] if setting else []
    own = options.get("own_rate", False)
    rates = task.learning_rate if own is True else best[:1]
    if isinstance(own, list):
        rates = [best[0] * times for times in own]
    return [(rate, options.get("b1", best[1])) for rate in rates]


def _tuning(
    study: Study, task: TaskPlan, arm: str, done: Mapping[Case, Run]
) -> list[Case]:
    grid = _grid(study, task, arm, done)
    return [
        Case(task.name, arm, *setting, seed)
        for seed in task.tuning_seeds
        for setting in grid
        if len(grid) > 1
    ]
