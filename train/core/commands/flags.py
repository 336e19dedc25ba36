"""The flags of every task that trains a model from scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.core.errors import InputError
from train.core.flags import Changeable, Count, TrainingFlags, check_flags
from train.core.optimizer import check_plan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from train.core.optimizer import Plan


@dataclass(frozen=True, kw_only=True)
class FromScratchFlags(TrainingFlags):
    """Flags of every task that trains a model from scratch."""

    steps: Changeable[Count] = 500
    """Training steps."""
    accumulate: Count = 1
    """Parts that a worker's share of the batch is divided into, computed one after
    another in the memory of one; the step stays that of the whole batch."""
    eval_every: Changeable[Count] = 50
    """Steps between evaluations on held-out examples; there is one at the end."""
    resume: Changeable[bool] = False
    """Go on with the run in --out, exactly, with its own settings. A run that has ended
    goes on if --steps is more than it has."""
    compare: bool = False
    """Train plain Adam as well, on the same samples, and draw it beside."""

    @property
    def phases(self) -> Sequence[Plan]:
        """The stretches of steps with an optimizer each, all defaults put in."""
        return (self.planned(self.steps),)

    @property
    def total_steps(self) -> int:
        """The steps of all phases."""
        return self.phases[-1].last

    @property
    def lengths(self) -> dict[str, Any]:
        """The step counts; a longer run keeps the schedule of its first ones."""
        return {"steps": self.steps}


def check_from_scratch(config: FromScratchFlags) -> None:
    """Refuses values that no task can be trained with.

    Args:
      config: The flags.

    Raises:
      InputError: A flag's value is out of its range, or contradicts another.
    """
    check_flags(config)
    if config.compare and config.optimizer == "adam":
        raise InputError("--compare trains plain Adam beside; drop --optimizer adam.")
    for plan in config.phases:
        check_plan(plan)
