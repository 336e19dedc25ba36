"""The comparison: which runs it takes, and in which order they are trained."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.convergence.arms import ADAM, ONEBIT_ADAM
from benchmarks.convergence.run import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from benchmarks.convergence.config import Config
    from benchmarks.convergence.run import Run
    from benchmarks.convergence.runs import Runs


class Study(NamedTuple):
    """The runs that have ended, by their place in the comparison.

    Attributes:
      steps: Training steps of each.
      freeze_step: Steps of the warm-up, where nothing else is said.
      tuning: Of each arm that is tuned, a run a learning rate.
      arms: Of each arm, at Adam's best rate, a run a seed.
      tuned_onebit: 1-bit Adam's at its own best rate, a run a seed.
      workers: Of each number of workers, Adam's and 1-bit Adam's, with one seed.
      freezes: 1-bit Adam's, a run a freeze step.
    """

    steps: int
    freeze_step: int
    tuning: Mapping[str, Sequence[Run]]
    arms: Mapping[str, Sequence[Run]]
    tuned_onebit: Sequence[Run]
    workers: Mapping[int, Mapping[str, Sequence[Run]]]
    freezes: Sequence[Run]


class Cases(NamedTuple):
    """The cases of a comparison, once Adam's best learning rate is known.

    Attributes:
      arms: Those of each arm.
      workers: Those of Adam and 1-bit Adam, for each number of workers.
      freezes: Those of 1-bit Adam with other freeze steps.
    """

    arms: dict[str, list[Case]]
    workers: dict[int, dict[str, list[Case]]]
    freezes: list[Case]


def tuning_cases(config: Config, arm: str) -> list[Case]:
    """A case a learning rate, all with the first seed."""
    seed, at = config.seeds[0], (config.workers, config.freeze_step)
    return [Case(arm, rate, seed, *at) for rate in config.learning_rates]


def seed_cases(config: Config, arm: str, rate: float) -> list[Case]:
    """A case a seed, all at one learning rate."""
    at = config.workers, config.freeze_step
    return [Case(arm, rate, seed, *at) for seed in config.seeds]


def compared_cases(config: Config, rate: float) -> Cases:
    """All cases but those of tuning.

    Args:
      config: The flags.
      rate: Adam's best learning rate.

    Returns:
      The cases.
    """
    first = config.seeds[0]
    return Cases(
        {arm: seed_cases(config, arm, rate) for arm in config.arms},
        {
            workers: {
                arm: [Case(arm, rate, first, workers, config.freeze_step)]
                for arm in (ADAM, ONEBIT_ADAM)
            }
            for workers in (config.workers, *config.more_workers)
        },
        [
            Case(ONEBIT_ADAM, rate, first, config.workers, freeze)
            for freeze in (*config.freezes, config.freeze_step)
        ],
    )


def best_rate(runs: Iterable[Run]) -> float:
    """The learning rate of the run with the least loss."""
    return min(runs, key=lambda run: run.loss).case.learning_rate


def tuned_onebit_cases(config: Config, runs: Runs) -> list[Case]:
    """1-bit Adam's cases at its own best rate; none before it has been tuned."""
    cases = tuning_cases(config, ONEBIT_ADAM)
    ended = runs.done(cases)
    if len(ended) < len(cases):
        return []
    return seed_cases(config, ONEBIT_ADAM, best_rate(ended))


def study_so_far(config: Config, runs: Runs, cases: Cases) -> Study:
    """The runs that have ended, in their places."""
    return Study(
        steps=config.shared.steps,
        freeze_step=config.freeze_step,
        tuning={
            arm: runs.done(tuning_cases(config, arm)) for arm in (ADAM, ONEBIT_ADAM)
        },
        arms={arm: runs.done(each) for arm, each in cases.arms.items()},
        tuned_onebit=runs.done(tuned_onebit_cases(config, runs)),
        workers={
            workers: {arm: runs.done(each) for arm, each in pair.items()}
            for workers, pair in cases.workers.items()
        },
        freezes=runs.done(cases.freezes),
    )


def study(config: Config, runs: Runs, report: Callable[[Study], None]) -> Study:
    """Trains what has not been trained.

    Args:
      config: The flags.
      runs: The runs, those that have ended among them.
      report: Called with the study so far, once Adam is tuned and after each training.

    Returns:
      All of it.
    """
    cases = compared_cases(
        config, best_rate([runs.of(case) for case in tuning_cases(config, ADAM)])
    )

    def train(each: Iterable[Case]) -> None:
        for case in each:
            if not runs.done([case]):
                runs.of(case)
                report(study_so_far(config, runs, cases))

    report(study_so_far(config, runs, cases))
    # A seed of all arms before the next, so that a study cut short compares them.
    train(chain(*zip(*cases.arms.values(), strict=True)))
    if ONEBIT_ADAM in config.arms:
        train(tuning_cases(config, ONEBIT_ADAM))
        train(tuned_onebit_cases(config, runs))
        train(cases.freezes)
    for workers in config.more_workers:
        train(chain(*zip(*cases.workers[workers].values(), strict=True)))
    return study_so_far(config, runs, cases)
