"""The bytes that a compiled step sends, counted from its own collectives.

XLA has no public parser for Python, so the text that `jax.stages.Compiled` gives is
read, in the forms that jax 0.10 to 0.12 print for CPUs and GPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from onebit_jax.workers.stages import branches_in, stage_of
from onebit_jax.workers.transfers import ring_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import jax

_COUNTED = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_UNCOUNTED = ("ragged-all-to-all", "send")

UNNAMED = "unnamed"
"""The stage of a branch whose name XLA has dropped, beside that of a named stage."""


class Collective(NamedTuple):
    """One collective of a compiled step.

    Attributes:
      op: its name in HLO, as 'all-reduce', without '-start'.
      dtype: its element type in HLO's names, as 'u32'; 'u32+f32' where XLA has
        combined several.
      bytes: the payload of one device: its operands, for an all-gather the result.
      axes: the mesh axes it works over (none if it has groups of one); None where its
        groups are not those of any axes of the mesh.
      group_size: n, the number of devices in a group.
      times: how often it runs in a step.
      stage: name of the stage that it runs in, or 'every' if it runs in all. Those of
        a stage 'a' also run in a stage 'a/b', which has more.
      sent_bytes: the bytes each device sends for it in a step, all times together.
    """

    op: str
    dtype: str
    bytes: int
    axes: tuple[str, ...] | None
    group_size: int
    times: int
    stage: str
    sent_bytes: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of a compiled step; printed, a table.

    Attributes:
      collectives: those of all stages, in the order of the program.
      stages: names of the stages that the program contains, in the order of its
        choice between them: none for plain Adam, one where the stage is static.
      mesh_axes: the names of the axes of the mesh.
    """

    collectives: tuple[Collective, ...]
    stages: tuple[str, ...]
    mesh_axes: tuple[str, ...]

    def sent_bytes(self, stage: str | None = None, axis: str | None = None) -> int:
        """Bytes each device sends in one step.

        Args:
          stage: name of a stage; may be left out where the program does the same in
            each step. Of a program without stages any name means all of it.
          axis: count only the collectives over this mesh axis. One that works over
            several axes at once counts for each of them.

        Returns:
          A number of bytes; the most that any device sends, where they differ.

        Raises:
          ValueError: if the stage must be named or is not one of the program's, if the
            axis is not in the mesh, or if a collective belongs to no axis.

        Example:
          >>> from onebit_jax import Collective
          >>> mean = Collective('all-reduce', 'f32', 400, ('data',), 4, 1, 'every', 600)
          >>> Traffic((mean,), (), ('data',)).sent_bytes()
          600
        """
        if axis is not None and axis not in self.mesh_axes:
            raise ValueError(
                f"the mesh has axes {self.mesh_axes}, not {axis!r}: name one of these."
            )
        differs = any(collective.stage != "every" for collective in self.collectives)
        if stage is None and len(self.stages) > 1 and differs:
            raise ValueError(
                f"this program has the stages {', '.join(self.stages)}: ask for "
                f"sent_bytes({self.stages[0]!r}) or another."
            )
        if stage is not None and self.stages and stage not in self.stages:
            raise ValueError(
                f"this program has no stage {stage!r}, but {', '.join(self.stages)}: "
                "name one of these, or compile one for that stage."
            )
        total = 0
        for collective in self.collectives:
            if stage is not None and not is_of(stage, collective.stage):
                continue
            if axis is not None and collective.axes is None:
                raise ValueError(
                    f"the groups of the program's {collective.op} are not those of "
                    "any mesh axes: ask for sent_bytes without an axis."
                )
            if axis is None or axis in (collective.axes or ()):
                total += collective.sent_bytes
        return total

    def __str__(self) -> str:
        """A table: a row a kind of collective, then the sums."""
        rows = [("collective", "dtype", "bytes", "axes", "n", "times", "stage", "sent")]
        for kind, count in Counter(self.collectives).items():
            op, dtype, size, axes, n, times, stage, sent = kind
            numbers = (f"{size:,}", _spelled(axes), str(n), str(times * count))
            rows.append((op, dtype, *numbers, stage, f"{sent * count:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        right = (False, False, True, False, True, True, False, True)
        lines = [
            "  ".join(
                cell.rjust(width) if flush else cell.ljust(width)
                for cell, width, flush in zip(row, widths, right, strict=True)
            )
            for row in rows
        ]
        for stage in self.stages or (None,):
            name = f" ({stage})" if stage else ""
            lines.append(
                f"a device sends {self.sent_bytes(stage):,} bytes a step{name}"
                f"{self._by_axes(stage)}"
            )
        return "\n".join(lines)

    def _by_axes(self, stage: str | None) -> str:
        """The bytes over each set of mesh axes, where there are several."""
        if len(self.mesh_axes) < 2:
            return ""
        sums = Counter[str]()
        for collective in self.collectives:
            if stage is None or is_of(stage, collective.stage):
                sums[_spelled(collective.axes).replace(",", " and ")] += (
                    collective.sent_bytes
                )
        sums.pop("-", None)
        return "".join(f", {sums[axes]:,} of them over {axes}" for axes in sorted(sums))


def _spelled(axes: tuple[str, ...] | None) -> str:
    return "?" if axes is None else ",".join(axes) or "-"


def is_of(stage: str, other: str) -> bool:
    """True for a stage that is another or inside of it, and so runs what that runs."""
    return other == "every" or f"{stage}/".startswith(f"{other}/")


def traffic(compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> Traffic:
    r"""The bytes each device sends in one step, by collective, mesh axis and stage.

    They are read off the optimised program, so they include what the partitioner added
    and what XLA combined, moved out of loops or widened. On CPU, an all-reduce of
    bfloat16 becomes one of float32. Of a payload of :math:`b` bytes in a group of
    :math:`n` devices, a device sends by rings, the algorithms that send least. For an
    all-reduce that is :math:`2 b (n - 1) / n`. For a reduce-scatter, an all-to-all and
    an all-gather (:math:`b` of its result) it is :math:`b (n - 1) / n`, for a
    permutation and a broadcast :math:`b`. All are rounded up to whole bytes.

    Of the branches of a conditional (skipping a step, accumulating gradients) the one
    that sends most counts as run, of those that belong to stages one of each stage. A
    collective inside a kernel or a callback cannot be seen.

    Args:
      compiled: a compiled step, as `jax.jit(step).lower(...).compile()`, or what
        `equinox.filter_jit(step).lower(...).compile()` gives.
      mesh: the mesh it was compiled for.

    Returns:
      The collectives, with their sums by stage and axis.

    Raises:
      ValueError: if the program was compiled for another number of devices, or the
        backend gives no text of its programs. Also if a loop with collectives has no
        trip count known to XLA.
      NotImplementedError: if what it sends is decided when it runs, or is not
        expressed by collectives.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> n = jax.device_count()
      >>> mesh = jax.make_mesh((n,), ('data',), axis_types=(AxisType.Auto,))
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=P('data'), out_specs=P())
      ... def mean(x):
      ...   return jax.lax.pmean(x, 'data')
      >>> compiled = mean.lower(jnp.zeros((n, 512))).compile()
      >>> traffic(compiled, mesh).sent_bytes() == 2 * (n - 1) * 4 * 512 // n
      True

    References:
      Patarasuk and Yuan, `Bandwidth optimal all-reduce algorithms for clusters of
      workstations <https://doi.org/10.1016/j.jpdc.2008.09.002>`_, 2009
    """
    # Equinox wraps what it compiles.
    text = getattr(compiled, "compiled", compiled).as_text()
    if text is None:
        raise ValueError(
            "this backend does not give the text of its programs: count an optimizer's "
            "bytes with onebit_jax.stage_costs."
        )
    module = parse(text)
    if module.size != mesh.size:
        raise ValueError(
            f"the program was compiled for {module.size} devices and the mesh has "
            f"{mesh.size}: give the mesh that it was compiled for."
        )
    named = _stages_in(module, module.entry)
    found = tuple(_run(module, mesh, module.entry, "every", _around(named)))
    places = branches_in([text])
    stages = sorted(
        named | {collective.stage for collective in found} - {"every"},
        key=lambda name: [(places.get(part, -1), part) for part in name.split("/")],
    )
    return Traffic(found, tuple(stages), mesh.axis_names)


def _run(
    module: Module, mesh: jax.sharding.Mesh, name: str, stage: str, only: str | None
) -> Iterator[Collective]:
    """The collectives that a computation runs, in a stage or in 'every'.

    Outside of the branches of a stage a collective runs in every step, whatever its
    name says, unless the program has one stage `only`.
    """
    scope = module.computations[name]
    for instruction in scope.values():
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in _COUNTED:
            is_named = stage_of(instruction.op_name) is not None
            where = only if only and is_named and stage == "every" else stage
            shapes = [scope[operand].shape for operand in instruction.operands]
            yield _collective(opcode, shapes, instruction.rest, mesh, where)
        elif opcode in _UNCOUNTED and "is_host_transfer=true" not in instruction.rest:
            raise NotImplementedError(
                f"the program contains a {opcode}, whose bytes its text does not tell: "
                "count them by hand, or use jax.lax.all_to_all or ppermute."
            )
        elif opcode == "conditional":
            yield from _run_branches(module, mesh, instruction.calls, stage, only)
        # An async-start names what it wraps, and its -update and -done name it again.
        elif opcode not in ("async-update", "async-done"):
            times = instruction.trip_count if opcode == "while" else 1
            for called in instruction.calls:
                for each in _run(module, mesh, called, stage, only):
                    if times is None:
                        raise ValueError(
                            "XLA does not know how often a loop with collectives runs "
                            f"({instruction.op_name or 'unnamed'}): give it a static "
                            "number of steps, as jax.lax.scan has."
                        )
                    yield each._replace(
                        times=each.times * times, sent_bytes=each.sent_bytes * times
                    )


def _run_branches(
    module: Module,
    mesh: jax.sharding.Mesh,
    branches: list[str],
    stage: str,
    only: str | None,
) -> Iterable[Collective]:
    """A conditional's collectives: of each stage the branch that sends most."""
    named = [_stages_in(module, branch) for branch in branches]
    heaviest: dict[str, list[Collective]] = {}
    for branch, stages in zip(branches, named, strict=True):
        # XLA's combiner drops names: beside a named stage's branch, another that has
        # collectives and no name is one of a stage, too.
        is_unnamed = any(named) and not stages
        own = UNNAMED if is_unnamed else _around(stages) or stage
        run = list(_run(module, mesh, branch, own, only))
        heaviest[own] = max(heaviest.get(own, []), run, key=_sent)
    return itertools.chain(*heaviest.values())


def _sent(collectives: list[Collective]) -> int:
    return sum(collective.sent_bytes for collective in collectives)


def _stages_in(module: Module, name: str) -> set[str]:
    """The stages named in a computation and in those that it runs.

    Not in its fusions and reductions, which XLA shares between equal ones.
    """
    found = set()
    for instruction in module.computations[name].values():
        found.add(stage_of(instruction.op_name))
        if instruction.opcode in ("conditional", "while", "call"):
            found.update(*(_stages_in(module, called) for called in instruction.calls))
    return found - {None}


def _around(stages: Iterable[str]) -> str | None:
    """The stage that all of some stages are or are inside of."""
    paths = zip(*(stage.split("/") for stage in stages), strict=False)
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, paths)
    return "/".join(parts[0] for parts in same) or None


def _collective(
    op: str, shapes: list[str], rest: str, mesh: jax.sharding.Mesh, stage: str
) -> Collective:
    """The account of one execution of a collective."""
    size = sum(map(size_in_bytes, shapes))
    groups = _groups(rest)
    if op != "collective-permute":
        groups = groups or [[*range(mesh.size)]]
    axes = _axes_of(groups, mesh, is_permutation=op == "collective-permute")
    n = (
        max(map(len, groups))
        if axes is None
        else math.prod(mesh.shape[axis] for axis in axes)
    )
    size *= n if op == "all-gather" else 1
    dtypes = dict.fromkeys(a[0] for shape in shapes for a in _ARRAY.findall(shape))
    sent = ring_bytes(op, size, n)
    return Collective(op, "+".join(dtypes), size, axes, n, 1, stage, sent)


def _axes_of(
    groups: list[list[int]], mesh: jax.sharding.Mesh, *, is_permutation: bool
) -> tuple[str, ...] | None:
    """The fewest axes whose groups these are, or inside of whose groups pairs are."""
    ids = np.arange(mesh.size).reshape(mesh.axis_sizes)
    given = set(map(frozenset, groups))
    for number in range(ids.ndim + 1):
        for places in itertools.combinations(range(ids.ndim), number):
            theirs = set(map(frozenset, _rows(ids, places)))
            inside = is_permutation and all(any(g <= t for t in theirs) for g in given)
            if inside or given == theirs:
                return tuple(mesh.axis_names[place] for place in places)
    return None


def _groups(rest: str) -> list[list[int]]:
    """The groups that a collective works among, or the pairs of a permutation.

    They are written out, `{{0,1},{2,3}}` (none: one group of all), as a reshaped and
    transposed iota, `[2,4]<=[4,2]T(1,0)`, or as axes of a mesh of XLA's own,
    `mesh['a'=4,'b'=2] {'a'}`, where `'a':(2)2` is a part of an axis.
    """
    found = re.search(r"\b(?:replica_groups|source_target_pairs)=(.*)", rest)
    text = found[1] if found else "{}"
    if lists := re.match(r"\{([{}\d, ]*)\}", text):
        return [_numbers(group) for group in re.findall(r"\{([^}]*)\}", lists[1])]
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _device_ids(iota[2]).reshape(_numbers(iota[1])).tolist()
    axes = re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", text)
    if axes is None:
        raise ValueError(
            f"unknown form of replica_groups, {text[:60]!r}: use a version of jax that "
            "onebit_jax is tested with, or report this line."
        )
    sizes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", axes[1])}
    # Each axis is split into (before, part, after), and the parts are grouped.
    parts = {name: (1, size, 1) for name, size in sizes.items()}
    for name, before, part in re.findall(r"'([^']*)':\((\d+)\)(\d+)", axes[3]):
        after = sizes[name] // (int(before) * int(part))
        parts[name] = (int(before), int(part), after)
    ids = _device_ids(axes[2] or f"[{math.prod(sizes.values())}]")
    names = re.findall(r"'([^']*)'", axes[3])
    places = [3 * list(parts).index(name) + 1 for name in names]
    return _rows(ids.reshape([n for split in parts.values() for n in split]), places)


def _rows(ids: np.ndarray, places: Sequence[int]) -> list[list[int]]:
    """The ids that differ along some axes alone, together."""
    last = np.moveaxis(ids, places, range(-len(places), 0))
    return last.reshape(-1, math.prod(ids.shape[place] for place in places)).tolist()


def _device_ids(text: str) -> np.ndarray:
    """Device ids as a list, `0,2,1,3`, or an iota, `[4,2]T(1,0)`."""
    if not text.startswith("["):
        return np.array(_numbers(text))
    dims, _, permutation = text.partition("T")
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return ids.transpose(_numbers(permutation)) if permutation else ids


class Instruction(NamedTuple):
    """One instruction of HLO: `%name = shape opcode(operands), attributes`."""

    shape: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", re.split(r"\), [\w\-]+=", self.rest)[0])

    @property
    def calls(self) -> list[str]:
        """Names of the computations it calls; a loop's body comes last."""
        return re.findall(r"%([\w.\-]+)", "".join(_CALLS.findall(self.rest)))

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
    """A module of HLO: the devices it runs on and its computations by name."""

    size: int
    entry: str
    computations: dict[str, dict[str, Instruction]]


_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r" +(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
_CALLS = re.compile(
    r"\b(?:to_apply|calls|called_computations|condition|body|branch_computations|"
    r"true_computation|false_computation)=\{?((?:%[\w.\-]+(?:, ?)?)+)"
)
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([^\]]*)\](\{[^}]*\})?")


def parse(text: str) -> Module:
    """Reads the text of a module that was compiled for one replica."""
    header, _, body = text.partition("\n")
    counts = dict(re.findall(r"\b(num_partitions|replica_count)=(\d+)", header))
    if int(counts.get("replica_count", 1)) > 1:
        raise ValueError("compile with jax.jit or jax.shard_map instead of jax.pmap.")
    module = Module(int(counts.get("num_partitions", 1)), "", {})
    instructions: dict[str, Instruction] = {}
    for line in body.splitlines():
        if opened := _COMPUTATION.match(line):
            instructions = module.computations[opened[2]] = {}
            module = module._replace(entry=opened[2]) if opened[1] else module
        elif match := _INSTRUCTION.match(line):
            instructions[match[1]] = Instruction(*match.groups()[1:])
    return module


def size_in_bytes(shape: str) -> int:
    """Bytes of the arrays of a shape; sub-byte elements count as they are stored."""
    total = 0
    for _, width, dims, layout in _ARRAY.findall(shape):
        # Where its layout does not say that it is packed, an element takes whole bytes.
        packed = re.search(r"E\((\d+)\)", layout)
        bits = int(packed[1]) if packed else max(8, int(width or 8))
        total += -(-math.prod(_numbers(dims)) * bits // 8)
    return total


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
