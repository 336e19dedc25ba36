"""The bytes that a worker has sent, from the stage that each step ran in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

EVERY = "every"
"""The stage of an optimizer that has none."""


@dataclass(frozen=True)
class Totals:
    """Steps that have run, and the bytes that one worker has sent in them.

    Attributes:
      steps: Steps run, of all phases.
      stage: The stage that the last step ran in; empty before the first.
      by_stage: Steps of this phase, by the stage that they ran in.
      taken_by_stage: The same without those that were skipped, as the optimizer's
        state tells them.
      skipped: How many of this phase's were skipped.
      total_bytes: Bytes sent in all steps.
      earlier_steps: Steps run in the phases before.
      earlier_skipped: How many of them were skipped.
    """

    steps: int = 0
    stage: str = ""
    by_stage: Mapping[str, int] = field(default_factory=dict)
    taken_by_stage: Mapping[str, int] = field(default_factory=dict)
    skipped: int = 0
    total_bytes: int = 0
    earlier_steps: int = 0
    earlier_skipped: int = 0

    @property
    def taken(self) -> int:
        """Steps of this phase that were not skipped."""
        return self.steps - self.earlier_steps - self.skipped

    @property
    def total_skipped(self) -> int:
        """Steps skipped in all phases."""
        return self.earlier_skipped + self.skipped

    def at_phase_start(self) -> Totals:
        """The same, before the first step of another phase."""
        return Totals(
            self.steps,
            total_bytes=self.total_bytes,
            earlier_steps=self.steps,
            earlier_skipped=self.total_skipped,
        )


def count(
    totals: Totals,
    steps: int,
    taken: Mapping[str, int],
    skipped: int,
    rates: Mapping[str, int],
) -> Totals:
    """The totals after so many steps, from what the optimizer's state tells.

    The state counts the steps that were taken in each stage; those that were skipped
    since the count before are taken for steps of the last stage since then.

    Args:
      totals: Those of the count before.
      steps: Steps run by now, of all phases.
      taken: `onebit_jax.steps_by_stage` of the state.
      skipped: Steps of this phase skipped by now.
      rates: Bytes that a worker sends in a step of each stage, in the stages' order.

    Returns:
      The totals by now.

    Example:
      >>> from train.core.totals import Totals, count
      >>> rates = {"warmup": 100, "compressed": 3}
      >>> count(Totals(), 10, {"warmup": 4, "compressed": 6}, 0, rates).total_bytes
      418
    """
    left = steps - totals.steps
    new = {}
    for stage in rates:
        since = int(taken.get(stage, 0)) - totals.taken_by_stage.get(stage, 0)
        # Of several optimizers, the stages that each tells may overlap.
        new[stage] = min(left, since)
        left -= new[stage]
    last = [totals.stage or next(iter(rates)), *(s for s, n in new.items() if n)][-1]
    new[last] += left
    return replace(
        totals,
        steps=steps,
        stage=[totals.stage, *(stage for stage, n in new.items() if n)][-1],
        by_stage={stage: totals.by_stage.get(stage, 0) + n for stage, n in new.items()},
        taken_by_stage={stage: int(n) for stage, n in taken.items()},
        skipped=skipped,
        total_bytes=totals.total_bytes + sum(n * rates[s] for s, n in new.items()),
    )
