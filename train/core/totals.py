"""The bytes that a worker has sent, from the stage that each step ran in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import onebit_jax

EVERY = "every"
"""The stage of an optimizer that has none."""


@dataclass(frozen=True)
class Totals:
    """Steps that have run, and the bytes that one worker has sent in them.

    Attributes:
      steps: Steps run, of all phases.
      stage: The stage that the last step ran in; empty before the first.
      by_stage: Steps of this phase, by the stage that they ran in.
      skipped: How many of this phase's were skipped.
      total_bytes: Bytes sent in all steps.
      earlier_steps: Steps run in the phases before.
      earlier_skipped: How many of them were skipped.
    """

    steps: int = 0
    stage: str = ""
    by_stage: Mapping[str, int] = field(default_factory=dict)
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

    def after(
        self, by_stage: Mapping[str, int], skipped: int, rates: Mapping[str, int]
    ) -> Totals:
        """The totals some steps later.

        Args:
          by_stage: Steps of this phase run by now, by stage; of the stages that were
            gone on with, the last is that of the last step.
          skipped: Steps of this phase skipped by now.
          rates: Bytes that a worker sends in a step of each stage.

        Returns:
          The totals by now.

        Example:
          >>> from train.core.totals import Totals
          >>> rates = {"warmup": 100, "compressed": 3}
          >>> Totals().after({"warmup": 4, "compressed": 6}, 0, rates).total_bytes
          418
        """
        new = {name: n - self.by_stage.get(name, 0) for name, n in by_stage.items()}
        return replace(
            self,
            steps=self.steps + sum(new.values()),
            stage=[self.stage, *(name for name, n in new.items() if n)][-1],
            by_stage=dict(by_stage),
            skipped=skipped,
            total_bytes=self.total_bytes + sum(n * rates[s] for s, n in new.items()),
        )


def count(
    totals: Totals, steps: int, measured: Mapping[str, Any], rates: Mapping[str, int]
) -> Totals:
    """The totals after so many steps, from what the optimizer's state tells.

    An optimizer runs in its first stage until the state tells of a freeze, and in its
    last from then on. The state counts the steps that were taken; those that were
    skipped between the count before and a freeze are taken for compressed ones.

    Args:
      totals: Those of the count before.
      steps: Steps run by now, of all phases.
      measured: `onebit_jax.metrics` of the state.
      rates: Bytes that a worker sends in a step of each stage, in the stages' order.

    Returns:
      The totals by now.
    """
    stages = list(rates)
    first, last = stages[0], stages[-1]
    before, now = (n - totals.earlier_steps for n in (totals.steps, steps))
    in_first = totals.by_stage.get(first, 0)
    if in_first == before:
        frozen_at = int(measured.get("frozen_at", 0))
        until = frozen_at + totals.skipped if frozen_at else now
        in_first = min(now, max(before, until))
    by_stage = {first: in_first}
    if first != last:
        by_stage[last] = now - in_first
    return totals.after(by_stage, int(measured.get("skipped", 0)), rates)


def stage_rates(traffic: onebit_jax.Traffic, axis: str | None = None) -> dict[str, int]:
    """Bytes that a worker sends in a step of each stage.

    Args:
      traffic: What a compiled step sends.
      axis: The one mesh axis to count collectives over; None for all.

    Returns:
      The bytes by the stage's name, in the stages' order.
    """
    if not traffic.stages:
        return {EVERY: traffic.sent_bytes(None, axis)}
    return {stage: traffic.sent_bytes(stage, axis) for stage in traffic.stages}
