"""The text of an optimised HLO module, read as far as its collectives need.

XLA has no public parser for Python; the text is what `jax.stages.Compiled` gives.
The forms below are those printed for CPUs and GPUs by jax 0.10 to 0.12.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r" +(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
_CALLED = re.compile(
    r"\b(to_apply|calls|called_computations|body|condition|branch_computations|"
    r"true_computation|false_computation)=\{?((?:%[\w.\-]+(?:, ?)?)+)"
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")
_UNKNOWN = (
    "this jax prints a form that onebit_jax cannot read; use one of the versions that "
    "it is tested with, or report this line."
)


class Instruction(NamedTuple):
    """One instruction: `%name = shape opcode(operands), attributes`."""

    shape: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        depth = 1
        for end, character in enumerate(self.rest):
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return re.findall(r"%([\w.\-]+)", self.rest[:end])
        raise ValueError(f"the operands of {self.opcode!r} do not end")

    @property
    def called(self) -> dict[str, list[str]]:
        """Names of the computations it calls, by attribute."""
        return {
            attribute: re.findall(r"%([\w.\-]+)", names)
            for attribute, names in _CALLED.findall(self.rest)
        }

    @property
    def calls(self) -> list[str]:
        """Names of all the computations it calls, of a conditional its branches."""
        return [name for names in self.called.values() for name in names]

    @property
    def op_name(self) -> str:
        """The name stack of the JAX operation it comes from, '' where XLA lost it."""
        match = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.rest)
        return match[1] if match else ""

    @property
    def trip_count(self) -> int | None:
        """The iterations of a while loop, where XLA knows them."""
        match = re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', self.rest)
        return int(match[1]) if match else None


class Module(NamedTuple):
    """A module: the number of devices it runs on and its computations by name."""

    size: int
    entry: str
    computations: dict[str, dict[str, Instruction]]


def parse(text: str) -> Module:
    """Reads the text of a module that was compiled for one replica."""
    header, _, body = text.partition("\n")
    counts = dict(re.findall(r"\b(num_partitions|replica_count)=(\d+)", header))
    if int(counts.get("replica_count", 1)) > 1:
        raise ValueError("compile with jax.jit or jax.shard_map instead of jax.pmap.")
    computations: dict[str, dict[str, Instruction]] = {}
    entry = ""
    instructions: dict[str, Instruction] | None = None
    for line in body.splitlines():
        if instructions is None:
            if opened := _COMPUTATION.match(line):
                instructions = computations[opened[2]] = {}
                entry = opened[2] if opened[1] else entry
        elif line.startswith("}"):
            instructions = None
        elif match := _INSTRUCTION.match(line):
            instructions[match[1]] = Instruction(match[2], match[3], match[4])
    if not entry:
        raise ValueError("this is not the text of a compiled HLO module.")
    return Module(int(counts.get("num_partitions", 1)), entry, computations)


def dtypes(shape: str) -> list[str]:
    """Element types of a shape, in HLO's names ('f32', 'u8', 'pred')."""
    return [dtype for dtype, _, _ in _ARRAY.findall(shape)]


def size_in_bytes(shape: str) -> int:
    """Bytes of the arrays of a shape; sub-byte elements count as they are stored."""
    return sum(
        -(-math.prod(map(int, re.findall(r"\d+", dims))) * _bits(dtype, layout) // 8)
        for dtype, dims, layout in _ARRAY.findall(shape)
    )


def _bits(dtype: str, layout: str) -> int:
    if dtype in ("pred", "token"):
        return 8 if dtype == "pred" else 0
    width = re.match(r"[a-z]+(\d+)", dtype)
    if width is None:
        raise ValueError(f"the element type {dtype!r} has no known width: {_UNKNOWN}")
    # Where its layout does not say that it is packed, an element takes whole bytes.
    packed = re.search(r"E\((\d+)\)", layout)
    return int(packed[1]) if packed else max(8, int(width[1]))


def source_target_pairs(instruction: Instruction) -> Groups:
    """The (source, target) partitions of a collective-permute."""
    match = re.search(r"\bsource_target_pairs=\{([{}\d, ]*)\}", instruction.rest)
    if match is None:
        raise ValueError(f"a collective-permute has no source_target_pairs: {_UNKNOWN}")
    return _lists(match[1])


def replica_groups(instruction: Instruction, size: int) -> Groups:
    """The groups of partitions that a collective works among.

    They are written out, `{{0,1},{2,3}}` (none: one group of all), as a reshaped and
    transposed iota, `[2,4]<=[4,2]T(1,0)`, or as axes of a mesh of XLA's own,
    `mesh['a'=4,'b'=2] {'a'}`, where `'a':(2)2` is a part of an axis.
    """
    match = re.search(r"\breplica_groups=(.*)", instruction.rest)
    everyone = (tuple(range(size)),)
    if match is None:
        return everyone
    text = match[1]
    if lists := re.match(r"\{([{}\d, ]*)\}", text):
        return _lists(lists[1]) or everyone
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _rows(_device_ids(iota[2]).reshape(_numbers(iota[1])))
    if axes := re.match(
        r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", text
    ):
        return _mesh_groups(*axes.groups())
    raise ValueError(f"unknown form of replica_groups, {text[:60]!r}: {_UNKNOWN}")


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> Groups:
    names = re.findall(r"'([^']*)'=", mesh)
    sizes = [int(size) for size in re.findall(r"'=(\d+)", mesh)]
    ids = _device_ids(device_ids or f"[{math.prod(sizes)}]")
    # Split each axis into (before, part, after); the parts that are named move last.
    parts = {name: (1, size, 1) for name, size in zip(names, sizes, strict=True)}
    for name, before, part in re.findall(r"'([^']*)':\((\d+)\)(\d+)", axes):
        rest = sizes[names.index(name)] // (int(before) * int(part))
        parts[name] = (int(before), int(part), rest)
    grouped = [3 * names.index(name) + 1 for name in re.findall(r"'([^']*)'", axes)]
    ids = ids.reshape([size for name in names for size in parts[name]])
    ids = np.moveaxis(ids, grouped, range(-len(grouped), 0))
    return _rows(ids.reshape(-1, math.prod(ids.shape[-len(grouped) :])))


def _device_ids(text: str) -> np.ndarray:
    """Device ids as a list, `0,2,1,3`, or an iota, `[4,2]T(1,0)`."""
    if not text.startswith("["):
        return np.array(_numbers(text))
    dims, _, permutation = text.partition("T")
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return ids.transpose(_numbers(permutation)) if permutation else ids


def _lists(text: str) -> Groups:
    return tuple(tuple(_numbers(row)) for row in re.findall(r"\{([^}]*)\}", text))


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in ids.tolist())


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
