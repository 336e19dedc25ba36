"""The bytes that a worker has sent, from the stage that each step ran in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Stage = Literal["warmup", "compressed"]


@dataclass(frozen=True)
class Sent:
    """What one worker has sent so far.

    Attributes:
      steps: Steps run, of all phases.
      warmup_steps: How many of this phase's ran in the warm-up.
      skipped: How many of this phase's were skipped.
      total_bytes: Bytes sent in all steps.
      earlier_steps: Steps run in the phases before.
      earlier_skipped: How many of them were skipped.
    """

    steps: int = 0
    warmup_steps: int = 0
    skipped: int = 0
    total_bytes: int = 0
    earlier_steps: int = 0
    earlier_skipped: int = 0

    @property
    def stage(self) -> Stage:
        """The stage that the last step ran in."""
        own = self.steps - self.earlier_steps
        return "compressed" if own > self.warmup_steps else "warmup"

    @property
    def taken(self) -> int:
        """Steps of this phase that were not skipped."""
        return self.steps - self.earlier_steps - self.skipped

    @property
    def total_skipped(self) -> int:
        """Steps skipped in all phases."""
        return self.earlier_skipped + self.skipped

    def at_phase_start(self) -> Sent:
        """The same, at the start of another phase."""
        return Sent(
            self.steps,
            total_bytes=self.total_bytes,
            earlier_steps=self.steps,
            earlier_skipped=self.total_skipped,
        )

    def after(
        self, steps: int, frozen_at: int, skipped: int, rates: Mapping[Stage, int]
    ) -> Sent:
        """Counts further steps.

        The state tells the number of warm-up steps that were taken; those that were
        skipped between the last count and a freeze count as compressed.

        Args:
          steps: Steps run by now, of all phases.
          frozen_at: Warm-up steps of this phase taken before the variance was frozen;
            0 as long as it is not.
          skipped: Steps of this phase skipped by now.
          rates: Bytes that a worker sends in a step of each stage.

        Returns:
          What has been sent by now.

        Example:
          >>> from train.core.totals import Sent
          >>> Sent().after(10, 4, 0, {"warmup": 100, "compressed": 3}).total_bytes
          418
        """
        before, own = self.steps - self.earlier_steps, steps - self.earlier_steps
        warmup_steps = self.warmup_steps
        if before == warmup_steps:
            taken = frozen_at + self.skipped if frozen_at else own
            warmup_steps = min(own, max(warmup_steps, taken))
        in_warmup = warmup_steps - self.warmup_steps
        compressed = own - before - in_warmup
        sent = in_warmup * rates["warmup"] + compressed * rates["compressed"]
        return replace(
            self,
            steps=steps,
            warmup_steps=warmup_steps,
            skipped=skipped,
            total_bytes=self.total_bytes + sent,
        )
