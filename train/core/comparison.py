"""The closing table of runs that were trained beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train.core.optimizer import Plan

LINK = 100e6 / 8
"""Bytes a second of a link of 100 Mbit/s."""


class Ended(NamedTuple):
    """A run at its end.

    Attributes:
      name: The optimizer's.
      loss: The last held-out loss, in nats.
      sent: Bytes that a worker sent in all.
      seconds: Seconds of its steps, without evaluations and checkpoints.
    """

    name: str
    loss: float
    sent: int
    seconds: float


def ended(
    name: str, lines: Sequence[dict[str, Any]], phases: Sequence[Plan]
) -> Ended | None:
    """A run at its end.

    Args:
      name: The optimizer's.
      lines: Those of its `metrics.jsonl`.
      phases: Its stretches of steps, the last of which may have gone on.

    Returns:
      The run; None without a finite loss.
    """
    losses = [x["eval_loss"] for x in lines if "eval_loss" in x]
    steps = [x for x in lines if "stage" in x]
    if not steps or not losses or losses[-1] is None:
        return None
    seconds, earlier = 0.0, 0
    for line in steps:
        step = line["step"]
        phase = next((phase for phase in phases if step <= phase.last), phases[-1])
        seconds += phase.batch * (step - earlier) / line["examples_per_second"]
        earlier = step
    return Ended(name, losses[-1], steps[-1]["total_sent_bytes"], seconds)


def closing(run: Ended, beside: Ended) -> str:
    """A table of two runs, and a sentence that says what it means.

    Args:
      run: The one that compresses.
      beside: Plain Adam's.

    Returns:
      Lines.

    Example:
      >>> from train.core.comparison import Ended, closing
      >>> onebit = Ended("onebit_adam", 1.98, 10**9, 9.0)
      >>> print(closing(onebit, Ended("adam", 2.0, 4 * 10**9, 8.0)))
                   held-out loss     MB sent   fewer  seconds
      onebit_adam         1.9800     1,000.0    4.0x        9
      adam                2.0000     4,000.0    1.0x        8
      onebit_adam ends 1.0 % below adam, and each worker has sent 4.0 times fewer bytes:
      over a link of 100 Mbit/s they take 80 seconds, not 320.
    """
    rows = [("", "held-out loss", "MB sent", "fewer", "seconds")]
    for each in (run, beside):
        fewer = f"{beside.sent / each.sent:.1f}x" if each.sent else "-"
        cells = f"{each.loss:.4f}", f"{each.sent / 1e6:,.1f}", fewer
        rows.append((each.name, *cells, f"{each.seconds:,.0f}"))
    width = max(len(name) for name, *_ in rows)
    difference = run.loss - beside.loss
    far = abs(difference)
    size = f"{far / beside.loss:.1%}" if beside.loss else f"{far:.4f}"
    where = f"{size} {'below' if difference < 0 else 'above'}".replace("%", " %")
    table = (
        f"{name:{width}}{loss:>15}{sent:>12}{fewer:>8}{time:>9}"
        for name, loss, sent, fewer, time in rows
    )
    if not run.sent:
        return "\n".join(
            [
                *table,
                f"{run.name} ends {where} {beside.name}, and one worker has nobody to "
                "send to:",
                "give more --workers to see what compression saves.",
            ]
        )
    seconds, others = (f"{each.sent / LINK:,.0f}" for each in (run, beside))
    return "\n".join(
        [
            *table,
            f"{run.name} ends {where} {beside.name}, and each worker has sent "
            f"{beside.sent / run.sent:.1f} times fewer bytes:",
            f"over a link of 100 Mbit/s they take {seconds} seconds, not {others}.",
        ]
    )
