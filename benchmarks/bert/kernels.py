"""What a compiled GPU program starts and keeps, read from its HLO."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r" +(?:ROOT )?%[\w.\-]+ = (.*?) ([a-z][\w\-]*)\((.*)")
_LOOP = re.compile(r"\bbody=%([\w.\-]+)")
_CALL = re.compile(r"\bto_apply=%([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:true|false)_computation=%([\w.\-]+)")
_BRANCH_LIST = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONFIG = re.compile(r'"fusion_backend_config":\s*\{"kind":\s*"([^"]*)"')
_KIND = re.compile(r"\bkind=k(\w+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+))\[([\d,]*)\]")

PRODUCT, SLICE = "matrix product", "copy of a slice"
FORWARD, BACKWARD = "cuDNN attention, forward", "cuDNN attention, backward"

_TARGETS = {"__cudnn$fmhaSoftmax": FORWARD, "__cudnn$fmhaSoftmaxBackward": BACKWARD}
_FUSIONS = {
    "__triton_nested_gemm_fusion": PRODUCT,
    "__triton_gemm": PRODUCT,
    "__triton": "Triton fusion",
    "__custom_fusion": SLICE,
}
_KINDS = {"Loop": "loop fusion", "Input": "reduction fusion"}


def kernels(text: str) -> Counter[str]:
    """Counts what is started when a program runs once, by kind.

    A loop's kernels count as often as it turns, a conditional's as those of its
    branch that has most.

    Args:
      text: An optimised and scheduled module for a GPU.

    Returns:
      From kind to number.
    """
    bodies: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header[2]
            bodies[name] = []
            entry = name if header[1] else entry
        elif name:
            bodies[name].append(line)

    def started(computation: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for line in bodies[computation]:
            if match := _INSTRUCTION.match(line):
                total.update(_started(match[2], match[3], started))
        return total

    return started(entry)


def _started(
    opcode: str, rest: str, started: Callable[[str], Counter[str]]
) -> Counter[str]:
    if opcode == "while":
        trips = _TRIPS.search(rest)
        times = int(trips[1]) if trips else 1
        return Counter({k: times * n for k, n in started(_found(_LOOP, rest)).items()})
    if opcode == "call":
        return started(_found(_CALL, rest))
    if opcode == "conditional":
        names = _BRANCHES.findall(rest)
        for listed in _BRANCH_LIST.findall(rest):
            names += re.findall(r"%([\w.\-]+)", listed)
        return max(map(started, names), key=lambda branch: branch.total())
    kind = _kind(opcode, rest)
    return Counter({kind: 1} if kind else {})


def _kind(opcode: str, rest: str) -> str | None:
    if opcode == "fusion":
        config = _CONFIG.search(rest)
        if config and config[1] in _FUSIONS:
            return _FUSIONS[config[1]]
        kind = _found(_KIND, rest)
        return _KINDS.get(kind, f"{kind.lower()} fusion")
    if opcode == "custom-call":
        target = _found(_TARGET, rest)
        if target.startswith("__cublas$"):
            return PRODUCT
        return _TARGETS.get(target, target)
    return opcode if opcode in ("copy", "sort", "scatter") else None


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    if match is None:
        raise ValueError(f"HLO of a form that is not known here: {text[:200]}")
    return match[1]


def kept(text: str, layers: int, batch: int, length: int) -> Counter[str]:
    """Bytes that the layers of a loop keep for its backward pass, by dtype.

    Args:
      text: The module.
      layers: Turns of the loop, more than one.
      batch: Sequences, more than one.
      length: Tokens of each.

    Returns:
      Of all arrays that the last loop of so many turns is given and that have an axis
      for layers, one for sequences and one for tokens.
    """
    loops = [
        line
        for line in text.splitlines()
        if " while(" in line and f'"known_trip_count":{{"n":"{layers}"}}' in line
    ]
    total: Counter[str] = Counter()
    for dtype, bits, axes in _ARRAY.findall(loops[-1].partition(" while(")[0]):
        # Attention has axes of size 1 between those for layers and sequences.
        sizes = [int(n) for n in axes.split(",") if n not in ("", "1")]
        if sizes[:2] == [layers, batch] and length in sizes[2:]:
            total[dtype] += math.prod(sizes) * max(1, int(bits or 8) // 8)
    return total
