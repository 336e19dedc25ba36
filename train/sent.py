"""The bytes that a worker has sent, from the stage that each step ran in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Stage = Literal["warmup", "compressed"]


@dataclass(frozen=True)
class Sent:
    """What one worker has sent so far.

    Attributes:
      steps: Steps run.
      warmup_steps: How many of them ran in the warm-up.
      skipped: How many of them were skipped.
      total_bytes: Bytes sent in them.
    """

    steps: int = 0
    warmup_steps: int = 0
    skipped: int = 0
    total_bytes: int = 0

    @property
    def stage(self) -> Stage:
        """The stage that the last step ran in."""
        return "compressed" if self.steps > self.warmup_steps else "warmup"

    def after(
        self, steps: int, frozen_at: int, skipped: int, rates: Mapping[Stage, int]
    ) -> Sent:
        """Counts further steps.

        The state tells the number of warm-up steps that were taken; those that were
        skipped between the last count and a freeze count as compressed.

        Args:
          steps: Steps run by now.
          frozen_at: Warm-up steps taken before the variance was frozen; 0 as long as
            it is not.
          skipped: Steps skipped by now.
          rates: Bytes that a worker sends in a step of each stage.

        Returns:
          What has been sent by now.

        Example:
          >>> from train.sent import Sent
          >>> Sent().after(10, 4, 0, {"warmup": 100, "compressed": 3}).total_bytes
          418
        """
        warmup_steps = self.warmup_steps
        if self.steps == warmup_steps:
            taken = frozen_at + self.skipped if frozen_at else steps
            warmup_steps = min(steps, max(warmup_steps, taken))
        in_warmup = warmup_steps - self.warmup_steps
        compressed = steps - self.steps - in_warmup
        sent = in_warmup * rates["warmup"] + compressed * rates["compressed"]
        return Sent(steps, warmup_steps, skipped, self.total_bytes + sent)
