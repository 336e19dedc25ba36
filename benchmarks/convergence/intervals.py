"""Differences from the baseline, paired by seed, with their intervals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.convergence.plan import Options
    from benchmarks.convergence.runs import Run

LEVEL = 0.95
"""Confidence of an interval."""


class Estimate(NamedTuple):
    """A mean, and half the width of its interval by Student's t; NaN of one value."""

    mean: float
    half_width: float


class Effect(NamedTuple):
    """The difference that a level of a factor makes beside the factor's first.

    Attributes:
      factor: The option.
      level: Its value.
      difference: Median difference of the loss, in nats, over all settings of the
        other factors and all seeds; negative where the level is better. Runs that
        diverge would decide a mean.
      better: Pairs in which it is better.
      pairs: All pairs but those that both diverged.
    """

    factor: str
    level: object
    difference: float
    better: int
    pairs: int


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of some values with its 95 % interval.

    Args:
      values: One or several.

    Returns:
      Mean and half-width.

    Example:
      >>> from benchmarks.convergence.intervals import estimate
      >>> [round(float(x), 3) for x in estimate([1.0, 2.0, 3.0])]
      [2.0, 2.484]
    """
    mean = float(np.mean(values))
    if len(values) < 2 or not math.isfinite(mean):
        return Estimate(mean, math.nan)
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    quantile = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)
    return Estimate(mean, float(quantile * error))


def pairs(runs: Sequence[Run], baseline: Sequence[Run]) -> list[tuple[Run, Run]]:
    """The runs of an arm, each with the baseline's of its seed, where there is one."""
    by_seed = {run.case.seed: run for run in baseline}
    return [(r, by_seed[r.case.seed]) for r in runs if r.case.seed in by_seed]


def beside(runs: Sequence[Run], baseline: Sequence[Run]) -> Estimate | None:
    """The mean difference of the final loss as a share of the baseline's mean.

    None without a seed in common.
    """
    both = pairs(runs, baseline)
    if not both:
        return None
    return _shares(both, float(np.mean([b.loss for _, b in both])))


def progress_lost(
    runs: Sequence[Run], baseline: Sequence[Run], freeze: int
) -> Estimate | None:
    """The mean difference as a share of what the baseline learns after the freeze.

    The loss at the freeze is that of the last evaluation up to it. None without a seed
    in common, an evaluation or any progress.
    """
    both = [
        (run, base, loss)
        for run, base in pairs(runs, baseline)
        if (loss := loss_at(base, freeze)) is not None
    ]
    if not both:
        return None
    progress = float(np.mean([loss - base.loss for _, base, loss in both]))
    if not progress > 0:
        return None
    return _shares([(run, base) for run, base, _ in both], progress)


def loss_at(run: Run, step: int) -> float | None:
    """The loss of the last evaluation up to a step; None without one."""
    earlier = [at for at in run.evaluations if at <= step]
    return run.evaluations[max(earlier)]["loss"] if earlier else None


def effects(
    product: Mapping[str, Options], runs: Mapping[str, Sequence[Run]]
) -> list[Effect]:
    """The difference that each level of each factor makes beside the factor's first.

    Args:
      product: The options of each arm of a product.
      runs: The runs of each arm, of one task.
    """
    found = []
    by_options = {_key(options): arm for arm, options in product.items()}
    for factor in next(iter(product.values())):
        levels = dict.fromkeys(options[factor] for options in product.values())
        first, *others = levels
        for level in others:
            differences = [
                run.loss - base.loss  # infinite where one of them diverged
                for options in product.values()
                if options[factor] == first
                for run, base in pairs(
                    runs.get(by_options[_key({**options, factor: level})], ()),
                    runs.get(by_options[_key(options)], ()),
                )
                if math.isfinite(run.loss) or math.isfinite(base.loss)
            ]
            if differences:
                better = sum(d < 0 for d in differences)
                median = float(np.median(differences))
                found.append(Effect(factor, level, median, better, len(differences)))
    return found


def _key(options: Options) -> frozenset[tuple[str, object]]:
    return frozenset(options.items())


def _shares(both: Sequence[tuple[Run, Run]], whole: float) -> Estimate:
    difference = estimate([run.loss - base.loss for run, base in both])
    return Estimate(difference.mean / whole, difference.half_width / whole)
