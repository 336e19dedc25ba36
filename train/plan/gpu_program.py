"""A compiled GPU program: its memory, its kernels, its collectives in flight."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from onebit_jax.inspect import traffic as hlo

if TYPE_CHECKING:
    import jax

    from train.plan.targets import Gpu

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

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_COMPUTING = frozenset(
    {"fusion", "custom-call", "while", "conditional", "call", "copy"}
)


def needed_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The memory that a program needs on a device, in bytes.

    Args:
      compiled: The program.

    Returns:
      Its arguments, its outputs, those of them that are in place, its temporaries, and
      all of it together.

    Raises:
      ValueError: The backend does not tell.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError("this backend does not tell the memory of its programs")
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "in_place": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }
    return parts | {"together": sum(parts.values()) - 2 * parts["in_place"]}


def memory_on(compiled: jax.stages.Compiled, gpu: Gpu) -> dict[str, Any]:
    """The memory that a program needs, beside a GPU's, and whether it fits."""
    needed = needed_memory(compiled)
    fits = needed["together"] <= gpu.memory
    return needed | {"gpu": gpu.memory, "fits": fits}


def kernels(text: str) -> Counter[str]:
    """The kernels that one run of a program starts, counted by kind.

    A loop's kernels count as often as it turns, a conditional's as those of its
    branch that has most.

    Args:
      text: An optimised and scheduled module for a GPU.

    Returns:
      From kind to number.
    """
    module = hlo.parse(text)

    def of_computation(name: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for instruction in module.computations[name].values():
            total.update(of_instruction(instruction))
        return total

    def of_instruction(instruction: hlo.Instruction) -> Counter[str]:
        opcode = instruction.opcode
        if opcode == "while":
            turns = instruction.trip_count
            turns = 1 if turns is None else turns
            body = of_computation(instruction.calls[-1])
            return Counter({kind: turns * number for kind, number in body.items()})
        if opcode in ("call", "conditional"):
            branches = map(of_computation, instruction.calls)
            return max(branches, key=lambda branch: branch.total())
        kind = _kind(instruction)
        return Counter([kind] if kind else [])

    return of_computation(module.entry)


def _kind(instruction: hlo.Instruction) -> str | None:
    """The kind of the kernel that an instruction is, None where it starts none."""
    if instruction.opcode == "fusion":
        backend = r'"fusion_backend_config":\s*\{"kind":\s*"([^"]*)"'
        named = re.search(backend, instruction.rest)
        if named and named[1] in _FUSIONS:
            return _FUSIONS[named[1]]
        kind = _attribute(r"\bkind=k(\w+)", instruction)
        return _KINDS.get(kind, f"{kind.lower()} fusion")
    if instruction.opcode == "custom-call":
        target = _attribute(r'custom_call_target="([^"]*)"', instruction)
        if target.startswith("__cublas$"):
            return PRODUCT
        return _TARGETS.get(target, target)
    opcode = instruction.opcode
    return opcode if opcode in ("copy", "sort", "scatter") else None


def _attribute(pattern: str, instruction: hlo.Instruction) -> str:
    match = re.search(pattern, instruction.rest)
    if match is None:
        raise ValueError(f"HLO of an unknown form: {instruction.rest[:200]}")
    return match[1]


def bytes_for_backward(text: str, layers: int, batch: int, length: int) -> Counter[str]:
    """Bytes that the layers of a loop leave for its backward pass, by dtype.

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
        instruction
        for computation in hlo.parse(text).computations.values()
        for instruction in computation.values()
        if instruction.opcode == "while" and instruction.trip_count == layers
    ]
    total: Counter[str] = Counter()
    for array in re.findall(r"\w+\[[\d,]*\]", loops[-1].shape):
        dtype, _, axes = array[:-1].partition("[")
        # Attention has axes of size 1 between those for layers and sequences.
        sizes = [int(size) for size in axes.split(",") if size not in ("", "1")]
        if sizes[:2] == [layers, batch] and length in sizes[2:]:
            total[dtype] += hlo.size_in_bytes(array)
    return total


class InFlight(NamedTuple):
    """A collective of a schedule.

    Attributes:
      op: Its name, as 'all-gather'.
      result: The shape of its result, as HLO writes it.
      asynchronous: Whether the program goes on before it is done.
      work: Kernels and loops that are started between its start and its end.
    """

    op: str
    result: str
    asynchronous: bool
    work: int


def in_flight(text: str) -> list[InFlight]:
    """The collectives of a schedule, with the kernels that run beside them.

    Args:
      text: An optimised module, whose instructions stand in the order of the schedule.

    Returns:
      Its collectives, in the order in which they end.
    """
    ended: list[InFlight] = []
    started: dict[str, tuple[str, int]] = {}
    work = 0
    for computation in hlo.parse(text).computations.values():
        for name, instruction in computation.items():
            opcode = instruction.opcode
            result = re.sub(r"\{[^}]*\}", "", instruction.shape)
            if opcode in _COLLECTIVES:
                ended.append(InFlight(opcode, result, False, 0))
                work += 1
            elif opcode.endswith("-start"):
                if op := _started(instruction):
                    started[name] = op, work
            elif opcode.endswith("-done"):
                start = instruction.operands[0]
                if start in started:
                    op, before = started.pop(start)
                    beside = work - before
                    ended.append(InFlight(op, result, beside > 0, beside))
            elif opcode in _COMPUTING:
                work += 1
    return ended


def _started(start: hlo.Instruction) -> str | None:
    """The collective that a start begins, named by itself or by what it wraps."""
    op = start.opcode.removesuffix("-start")
    if op in _COLLECTIVES:
        return op
    wrapped = next(iter(start.calls), "")
    return next((each for each in _COLLECTIVES if each in wrapped), None)
