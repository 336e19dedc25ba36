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
    """A run at its end; None without a finite loss.

    Args:
      name: The optimizer's.
      lines: Those of its `metrics.jsonl`.
      phases: Its stretches of steps, the last of which may have gone on.
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


def closing(beside: Ended, *runs: Ended) -> str:
    """A table of runs, and a sentence for each that says what it means.

    Args:
      beside: Plain Adam's.
      *runs: Those that compress.

    Example:
      >>> from train.core.comparison import Ended, closing
      >>> onebit = Ended("onebit_adam", 1.98, 10**9, 9.0)
      >>> local = Ended("local", 2.02, 10**8, 9.0)
      >>> print(closing(Ended("adam", 2.0, 4 * 10**9, 8.0), onebit, local))
                   held-out loss     MB sent   fewer  seconds
      onebit_adam         1.9800     1,000.0    4.0x        9
      local               2.0200       100.0   40.0x        9
      adam                2.0000     4,000.0    1.0x        8
      onebit_adam ends 1.0 % below adam, and each worker has sent 4.0 times fewer bytes:
      over a link of 100 Mbit/s they take 80 seconds, not 320.
      local ends 1.0 % above adam, and each worker has sent 40.0 times fewer bytes:
      over a link of 100 Mbit/s they take 8 seconds, not 320.
    """
    width = max(len(run.name) for run in (*runs, beside))
    lines = [f"{'':{width}}{'held-out loss':>15}{'MB sent':>12}   fewer  seconds"]
    for name, loss, sent, seconds in (*runs, beside):
        fewer = f"{beside.sent / sent:.1f}x" if sent else "-"
        numbers = f"{loss:>15.4f}{sent / 1e6:>12,.1f}{fewer:>8}{seconds:>9,.0f}"
        lines.append(f"{name:{width}}{numbers}")
    for run in runs:
        apart = abs(run.loss - beside.loss)
        size = f"{100 * apart / beside.loss:.1f} %" if beside.loss else f"{apart:.4f}"
        where = "below" if run.loss < beside.loss else "above"
        ends = f"{run.name} ends {size} {where} {beside.name}, and"
        if run.sent:
            lines += [
                f"{ends} each worker has sent {beside.sent / run.sent:.1f} times fewer "
                "bytes:",
                f"over a link of 100 Mbit/s they take {_over_link(run)} seconds, not "
                f"{_over_link(beside)}.",
            ]
        else:
            lines += [
                f"{ends} one worker has nobody to send to:",
                "give more --workers to see what compression saves.",
            ]
    return "\n".join(lines)


def _over_link(run: Ended) -> str:
    seconds = run.sent / LINK
    return f"{seconds:,.0f}" if seconds >= 1 else f"{seconds:.1f}"
