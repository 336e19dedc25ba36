"""The plans of a pre-training's phases, each of sequences of one length."""

from __future__ import annotations

from dataclasses import dataclass

from train.core.optimizer import Plan


@dataclass(frozen=True, kw_only=True)
class LengthPlan(Plan):
    """The plan of a phase whose sequences have one length.

    The phase begins with the parameters that the one before left and with an optimizer
    that is new: moments, schedule and freeze count its own steps. DeepSpeedExamples
    begin the schedule anew likewise (`--rewarmup`), and the paper's second phase has a
    warm-up of its own.

    Attributes:
      seq: Tokens a sequence.
      accumulate: Micro-batches that a worker's share of them is computed in.
    """

    seq: int
    accumulate: int
