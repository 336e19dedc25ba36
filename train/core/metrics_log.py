"""`metrics.jsonl`: a line of JSON a step logged and a line an evaluation."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from train.core.errors import InputError
from train.core.text_file import replace_text

if TYPE_CHECKING:
    from pathlib import Path

FILE = "metrics.jsonl"
DIVERGED = 1.2
"""A last loss above so many times the first is told as a fault."""


@dataclass(frozen=True)
class StepMetrics:
    """Measures of a step.

    Attributes:
      step: The step, counted from 1.
      loss: Its training loss, in nats; written as null where it is not finite.
      stage: The last of the optimizer's stages, in their order, in which a step has run
        since the line before; `every` for an optimizer without stages.
      sent_bytes: Bytes that one worker sends in a step of that stage, but for those of
        the loss's mean.
      total_sent_bytes: Bytes that one worker sent up to it.
      skipped: Steps skipped so far, for gradients that were not finite.
      learning_rate: Its learning rate.
      examples_per_second: Examples trained on a second since the last line, of all
        workers together; the time of evaluations and checkpoints does not count.
      optimizer: What `onebit_jax.metrics` says of the optimizer's state after it.
    """

    step: int
    loss: float
    stage: str
    sent_bytes: int
    total_sent_bytes: int
    skipped: int
    learning_rate: float
    examples_per_second: float
    optimizer: dict[str, float]


@dataclass(frozen=True)
class EvalMetrics:
    """An evaluation on held-out examples.

    Attributes:
      step: Steps trained before it.
      means: Means over the examples by name, the loss in nats as 'loss'; written as
        `eval_loss` and likewise.
    """

    step: int
    means: dict[str, float]


def append(folder: Path, metrics: StepMetrics | EvalMetrics) -> None:
    """Writes a line, at once."""
    values = asdict(metrics)
    means = values.pop("means", {})
    values |= {f"eval_{name}": mean for name, mean in means.items()}
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(_finite(values), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines, but for one that a killed process left unfinished."""
    if not (folder / FILE).exists():
        return []
    text = (folder / FILE).read_text(encoding="utf-8", errors="replace")
    lines = []
    for number, line in enumerate(text.rpartition("\n")[0].splitlines(), start=1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise InputError(
                f"line {number} of {folder / FILE} is damaged ({error}); remove it to "
                "go on."
            ) from error
    return lines


def truncate(folder: Path, step: int) -> None:
    """Drops the lines after a step, which will be trained again."""
    lines = [line for line in read(folder) if line["step"] <= step]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    replace_text(folder / FILE, text)


def summary(log: list[dict[str, Any]]) -> str:
    """The end of a run's lines as a sentence: losses, bytes, a loss that has risen.

    Example:
      >>> lines = [dict(step=n, loss=3.0 / n, total_sent_bytes=1e6 * n) for n in (1, 2)]
      >>> summary([*lines, {'step': 2, 'eval_loss': 1.6}])
      'step 2, loss 1.5000, held-out loss 1.6000, 2.0 MB sent by a worker'
    """
    steps = [line for line in log if "loss" in line]
    if not steps:
        return f"{FILE} has no step"
    first, last = steps[0]["loss"], steps[-1]["loss"]
    parts = [f"step {steps[-1]['step']:,}"]
    if last is not None:
        parts.append(f"loss {last:.4f}")
    parts += [
        f"held-out {name.removeprefix('eval_')} {mean:.4f}"
        for name, mean in log[-1].items()
        if name.startswith("eval_") and mean is not None
    ]
    parts.append(f"{steps[-1]['total_sent_bytes'] / 1e6:,.1f} MB sent by a worker")
    if last is None:
        fault = "the loss is not finite"
    elif first is not None and last > DIVERGED * first:
        fault = f"the loss has risen, from {first:.4f}"
    else:
        return ", ".join(parts)
    return f"{', '.join(parts)}; {fault}: give a new run a smaller --learning-rate"
