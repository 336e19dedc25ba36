"""Which collectives of a scheduled GPU program are in flight while it computes."""

from __future__ import annotations

import re
from typing import NamedTuple

_INSTRUCTION = re.compile(r" +(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_WORK = frozenset({"fusion", "custom-call", "while", "conditional", "call", "copy"})


class InFlight(NamedTuple):
    """A collective of a schedule.

    Attributes:
      op: What it is, as 'all-gather'.
      result: The shape of its result, as HLO writes it.
      asynchronous: Whether the program goes on before it is done.
      work: Kernels and loops that are started between its start and its end.
    """

    op: str
    result: str
    asynchronous: bool
    work: int


def in_flight(text: str) -> list[InFlight]:
    """Reads the schedule of an optimised module.

    Args:
      text: Its HLO, whose instructions stand in the order of the schedule.

    Returns:
      Its collectives, in the order in which they end.
    """
    found: list[InFlight] = []
    started: dict[str, tuple[str, int]] = {}
    work = 0
    for line in text.splitlines():
        if not (match := _INSTRUCTION.match(line)):
            continue
        name, shape, opcode, rest = match.groups()
        if opcode in _COLLECTIVES:
            found.append(InFlight(opcode, _plain(shape), False, 0))
            work += 1
        elif opcode.endswith("-start"):
            op = _collective(opcode, rest)
            if op:
                started[name] = op, work
        elif opcode.endswith("-done"):
            operand = re.match(r"[^%]*%([\w.\-]+)", rest)
            if operand and operand[1] in started:
                op, before = started.pop(operand[1])
                found.append(InFlight(op, _plain(shape), work > before, work - before))
        elif opcode in _WORK:
            work += 1
    return found


def _collective(opcode: str, rest: str) -> str | None:
    """What a start starts: named by itself, or by the computation that it wraps."""
    op = opcode.removesuffix("-start")
    if op in _COLLECTIVES:
        return op
    called = re.search(r"\bcalls=%([\w\-]+)", rest)
    return next((c for c in _COLLECTIVES if called and c in called[1]), None)


def _plain(shape: str) -> str:
    return re.sub(r"\{[^}]*\}", "", shape)
