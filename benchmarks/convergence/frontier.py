"""The frontier of loss against bytes: arms that no line between two others beats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.convergence.intervals import Estimate, estimate, pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.convergence.runs import Case, Run


class Point(NamedTuple):
    """Where an arm stands.

    Attributes:
      arm: Its name.
      fewer: How many times fewer bytes each of its workers sent than as many of the
        baseline's, which all-reduce by rings; infinite where they sent none.
      share: By how much its loss lies above the baseline's of the same seed, as a share
        of that, in the mean of the tasks; with its interval over the seeds.
    """

    arm: str
    fewer: float
    share: Estimate


def points(
    runs: Sequence[Run], baseline: str, workers: Callable[[Case], int]
) -> list[Point]:
    """Where the arms of a round stand, but those that diverged.

    Args:
      runs: those of the round, the baseline's among them.
      baseline: the arm that all are compared with.
      workers: how many a case has.

    Returns:
      A point for each arm that ran in every task, in their order.
    """
    by_arm: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        by_arm.setdefault(run.case.arm, {}).setdefault(run.case.task, []).append(run)
    base = by_arm.get(baseline, {})
    found = []
    for arm, tasks in by_arm.items():
        both = [
            each for task in base for each in pairs(tasks.get(task, ()), base[task])
        ]
        by_seed: dict[int, list[float]] = {}
        for run, beside in both:
            share = run.loss / beside.loss - 1
            by_seed.setdefault(run.case.seed, []).append(share)
        means = [sum(s) / len(s) for s in by_seed.values() if len(s) == len(base)]
        if means and all(map(math.isfinite, means)):
            sent = sum(run.sent_bytes for run, _ in both)
            # Those of another number of workers by what rings send: 2 (n - 1) / n.
            theirs = sum(
                beside.sent_bytes
                * _of_ring(workers(run.case))
                / _of_ring(workers(beside.case))
                for run, beside in both
            )
            fewer = theirs / sent if sent else math.inf
            found.append(Point(arm, fewer, estimate(means)))
    return found


def _of_ring(workers: int) -> float:
    return (workers - 1) / workers


def hull(points: Sequence[Point]) -> list[Point]:
    """The lower convex hull of shares over the logarithm of bytes.

    Args:
      points: in any order.

    Returns:
      Those of the hull, from most bytes to fewest.

    Example:
      >>> from benchmarks.convergence.frontier import Point, hull
      >>> from benchmarks.convergence.intervals import estimate
      >>> places = {"a": (1, 0.0), "b": (10, 0.2), "c": (100, 0.3), "d": (10, 0.1)}
      >>> points = [Point(k, x, estimate([y])) for k, (x, y) in places.items()]
      >>> [point.arm for point in hull(points)]
      ['a', 'd', 'c']
    """
    low: list[Point] = []
    for new in sorted(points, key=lambda each: (each.fewer, each.share.mean)):
        if low and low[-1].fewer == new.fewer:
            continue
        while len(low) > 1 and _slope(low[-2], low[-1]) >= _slope(low[-2], new):
            low.pop()
        low.append(new)
    return low


def _slope(left: Point, right: Point) -> float:
    return (right.share.mean - left.share.mean) / math.log(right.fewer / left.fewer)
