"""A pre-training's phases: stretches of steps with sequences of one length each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Phase:
    """Steps with sequences of one length, their schedule and their freeze.

    A phase begins with the parameters that the one before left and with an optimizer
    that is new: moments, schedule and freeze count its own steps. DeepSpeedExamples
    begin the schedule anew likewise (`--rewarmup`), and the paper's second phase has a
    warm-up of its own.

    Attributes:
      flags: What its flags begin with.
      seq: Tokens a sequence.
      batch: Sequences a step, of all workers together.
      accumulate: Micro-batches that a worker's share of them is computed in.
      earlier_steps: Steps of the phases before.
      steps: Its own steps.
      learning_rate: Peak of the learning rate.
      warmup: Steps in which it rises.
      decay_rate: Factor by which it falls.
      decay_every: Steps in which it falls by that; None for a linear fall to a tenth.
      freeze: Steps before 1-bit Adam freezes its variance.
    """

    flags: str
    seq: int
    batch: int
    accumulate: int
    earlier_steps: int
    steps: int
    learning_rate: float
    warmup: int
    decay_rate: float
    decay_every: int | None
    freeze: int | Literal["auto"]

    @property
    def last(self) -> int:
        """The steps of the run at its end."""
        return self.earlier_steps + self.steps
