"""Which optimizer to take: the lines of code that docs/choosing.md ends in."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from train.plan.report import Prediction


class Answer(NamedTuple):
    """A row of the page.

    Attributes:
      case: Whom it is for.
      line: What to take: code, or words where nothing is to be changed.
      fewer: How many times fewer bytes than Adam it sent, where that was measured.
      numbers: The workers, or the steps, that it is for.
    """

    case: str
    line: str
    fewer: str = ""
    numbers: range = range(0)


LOCAL_STEPS = (
    Answer(
        "2 to 4",
        'local_steps(optax.contrib.muon(rate), sign_mean("data", scale="mean_abs"), '
        "every(8))",
        "233 to 246 times",
        range(2, 5),
    ),
    Answer(
        "8; also 2 to 4 where loss matters more than bytes",
        'local_steps(optax.contrib.muon(rate), quantized_mean("data", 4), every(4))',
        "31 times",
        range(2, 9),
    ),
)
"""Answers to how many workers there are."""

RECIPES = (
    Answer(
        "LAMB, or batches of tens of thousands",
        'onebit_lamb(rate, sign_mean("data"), freeze_at(n))',
    ),
    Answer(
        "Lion, known to work on your model",
        'distributed_lion(rate, vote_mean("data"))',
    ),
    Answer(
        "you want no warm-up and no stored errors",
        'binsgdm(rate, random_vote_mean("data"), decay=b1)',
    ),
)
"""Answers to which recipe there is now, but for Adam's."""

STEPS = (
    Answer(
        "fewer than 500",
        "Optax's optimizer: there is little to save",
        "1",
        range(500),
    ),
    Answer(
        "500 or more",
        'onebit_adamw(rate, sign_mean("data"), freeze_at(steps // 7), '
        'warmup_exchange=quantized_mean("data", 8))',
        "15 times",
        range(500, 2**31),
    ),
)
"""Answers to how many steps a run of Adam's has."""

HIERARCHICAL = 'hierarchical(sign_mean("host"), within="device")'
"""What stands for `sign_mean("data")` where hosts have several GPUs, each of which is
one worker."""


NOT_TRIED = "With more than eight workers local steps were not tried."
"""What is known of local steps with more workers."""


def advice(prediction: Prediction, steps: int | None) -> str:
    """The lines of code for a cluster, those of the page for the same answers.

    Args:
      prediction: What each optimizer's steps cost there.
      steps: Steps of a run; None where they are not known.
    """
    compressed, local = prediction.pays, prediction.local_steps_pay
    lines = ["To take (docs/choosing.md):"]
    if compressed:
        fitting = [c for c in STEPS if steps is None or steps in c.numbers]
        adams = [(f"Adam or AdamW, {c.case} steps", c.line) for c in fitting]
        lines += _aligned([*adams, *((c.case, c.line) for c in RECIPES)])
    if local:
        where = "If those hours are too many, local" if compressed else "Local"
        fitting = [c for c in LOCAL_STEPS if prediction.cluster.hosts in c.numbers]
        rows = _aligned([(c.case, c.line) for c in fitting])
        lines += [f"{where} steps, by workers:", *rows] if rows else [NOT_TRIED]
    if not compressed and not local:
        return f"{lines[0]} Optax's optimizer."
    if prediction.cluster.hosts > 1 and prediction.cluster.gpus > 1:
        lines += [
            f"Where each GPU holds all parameters: {HIERARCHICAL}, and others likewise."
        ]
    return "\n".join(lines)


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(case) for case, _ in rows), default=0)
    return [f"  {case:{width}}  {line}" for case, line in rows]
