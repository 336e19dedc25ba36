"""The collectives of a compiled program: what, over which axes, when and how often."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from onebit_jax import _hlo
from onebit_jax._stages import COMPRESSED_SCOPE, WARMUP_SCOPE, Stage

if TYPE_CHECKING:
    from collections.abc import Iterable

    import jax

OTHER_STAGE: dict[Stage, Stage] = {"warmup": "compressed", "compressed": "warmup"}

_COUNTED = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_UNCOUNTED = ("ragged-all-to-all", "send")


class Collective(NamedTuple):
    """One collective of a compiled step.

    Attributes:
      op: its name in HLO, as 'all-reduce', without '-start'.
      dtype: its element type in HLO's names, as 'u32'; 'u32+f32' where XLA has
        combined several.
      bytes: the payload of one worker: its operands, for an all-gather the result.
      axes: the mesh axes it works over (none if it has groups of one); None where its
        groups are not those of any axes of the mesh.
      group_size: n, the number of workers in a group.
      times: how often it runs in a step.
      stage: 'warmup', 'compressed', or 'every' if it runs in both.
      sent_bytes: the bytes each worker sends for it in a step, all times together.
    """

    op: str
    dtype: str
    bytes: int
    axes: tuple[str, ...] | None
    group_size: int
    times: int
    stage: Literal["warmup", "compressed", "every"]
    sent_bytes: int

    def repeated(self, times: int) -> Collective:
        """The same collective inside a loop that runs `times`."""
        return self._replace(
            times=self.times * times, sent_bytes=self.sent_bytes * times
        )


def collectives(
    module: _hlo.Module, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> tuple[tuple[Collective, ...], tuple[Stage, ...]]:
    """The collectives that a step runs, and the stages that the program contains."""
    stages = _Stages(module)
    named = stages.of_computation(module.entry)

    @functools.cache
    def run_by(computation: str) -> tuple[Collective, ...]:
        instructions = module.computations[computation]
        return sum((run_in(i, instructions) for i in instructions.values()), ())

    def run_in(
        instruction: _hlo.Instruction, scope: dict[str, _hlo.Instruction]
    ) -> tuple[Collective, ...]:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in _COUNTED:
            shapes = [scope[name].shape for name in instruction.operands]
            found = _collective(opcode, instruction, shapes, mesh)
            own = stages.of_name(instruction)
            # Outside of the branches of a stage a collective runs in every step,
            # whatever its name says, unless the program has one stage only.
            return (found._replace(stage=own) if {own} == named else found,)
        if opcode in _UNCOUNTED and "is_host_transfer=true" not in instruction.rest:
            raise NotImplementedError(
                f"the program contains a {opcode}, whose bytes its text does not tell"
            )
        if opcode == "conditional":
            return _run_by_branches(
                stages.of_branches(instruction), map(run_by, instruction.calls)
            )
        if opcode == "while":
            condition, body = (
                run_by(instruction.called[part][0]) for part in ("condition", "body")
            )
            return _run_by_loop(instruction, condition, body)
        # An async-start names what it wraps, and its -update and -done name it again.
        if opcode in ("async-update", "async-done"):
            return ()
        return sum(map(run_by, instruction.calls), ())

    return run_by(module.entry), tuple(sorted(named, reverse=True))


def _run_by_branches(
    stages: list[Stage | None], branches: Iterable[tuple[Collective, ...]]
) -> tuple[Collective, ...]:
    """What a conditional runs: each stage's branch in it, or else the heaviest."""
    if not any(stages):
        return max(branches, key=lambda run: sum(c.sent_bytes for c in run))
    return tuple(
        collective._replace(stage=stage) if stage else collective
        for stage, run in zip(stages, branches, strict=True)
        for collective in run
    )


def _run_by_loop(
    loop: _hlo.Instruction,
    condition: tuple[Collective, ...],
    body: tuple[Collective, ...],
) -> tuple[Collective, ...]:
    times = loop.trip_count
    if times is None and (condition or body):
        raise ValueError(
            "XLA does not know how often a loop with collectives runs "
            f"({loop.op_name or 'unnamed'}): give it a static number of steps, as "
            "jax.lax.scan has"
        )
    times = times or 0
    return (
        *(collective.repeated(times + 1) for collective in condition),
        *(collective.repeated(times) for collective in body),
    )


def _collective(
    op: str,
    instruction: _hlo.Instruction,
    shapes: list[str],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> Collective:
    """The account of one execution of a collective."""
    size = sum(map(_hlo.size_in_bytes, shapes))
    if op == "collective-permute":
        pairs = _hlo.source_target_pairs(instruction)
        axes = _varying_axes(pairs, mesh)
        n = math.prod(mesh.shape[axis] for axis in axes)
        sent = size if n > 1 else 0
    else:
        groups = _hlo.replica_groups(instruction, mesh.size)
        axes = _axes_of_groups(groups, mesh)
        n = max(map(len, groups))
        if op == "all-gather":
            size *= n
        sent = _sent_bytes(op, size, n)
    dtypes = dict.fromkeys(dtype for shape in shapes for dtype in _hlo.dtypes(shape))
    return Collective(op, "+".join(dtypes), size, axes, n, 1, "every", sent)


def _sent_bytes(op: str, size: int, n: int) -> int:
    if op == "collective-broadcast":
        return size if n > 1 else 0
    rounds = 2 if op == "all-reduce" else 1
    return -(-rounds * (n - 1) * size // n)


def _varying_axes(
    groups: _hlo.Groups, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> tuple[str, ...]:
    """The axes along which the coordinates of a group's partitions vary."""
    ids = np.array(groups, int).reshape(len(groups), -1 if groups else 0)
    coordinates = np.stack(np.unravel_index(ids, mesh.axis_sizes))
    varies = (coordinates != coordinates[..., :1]).any(axis=(1, 2))
    return tuple(
        axis for axis, there in zip(mesh.axis_names, varies, strict=True) if there
    )


def _axes_of_groups(
    groups: _hlo.Groups, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> tuple[str, ...] | None:
    """The axes whose groups these are, or None."""
    axes = _varying_axes(groups[:1], mesh)
    positions = [mesh.axis_names.index(axis) for axis in axes]
    n = math.prod(mesh.shape[axis] for axis in axes)
    ids = np.arange(mesh.size).reshape(mesh.axis_sizes)
    ids = np.moveaxis(ids, positions, range(-len(axes), 0)).reshape(-1, n)
    same = set(map(frozenset, ids.tolist())) == set(map(frozenset, groups))
    return axes if same else None


class _Stages:
    """Which computations of a module belong to which stage."""

    def __init__(self, module: _hlo.Module):
        self._computations = module.computations
        self._known: dict[str, frozenset[Stage]] = {}

    def of_name(self, instruction: _hlo.Instruction) -> Stage | None:
        """The stage that the name of an instruction tells."""
        name = instruction.op_name
        warmup, compressed = WARMUP_SCOPE in name, COMPRESSED_SCOPE in name
        if warmup == compressed:
            return None
        return "warmup" if warmup else "compressed"

    def of_branches(self, conditional: _hlo.Instruction) -> list[Stage | None]:
        """The stage of each branch; None for one that has both or neither."""
        branches = conditional.calls
        found = [self.of_computation(name) for name in branches]
        stages: list[Stage | None] = [
            next(iter(each)) if len(each) == 1 else None for each in found
        ]
        # XLA's combiner drops names: a branch that sends beside the other stage's.
        for own, other in ((0, 1), (1, 0)):
            if len(found) == 2 and not found[own] and self._sends(branches[own]):
                known = stages[other]
                stages[own] = known and OTHER_STAGE[known]
        return stages

    def of_computation(self, name: str) -> frozenset[Stage]:
        """The stages named in a computation and in those that it runs.

        Not in its fusions and reductions, which XLA shares between equal ones.
        """
        if name not in self._known:
            found: set[Stage | None] = set()
            for instruction in self._computations[name].values():
                found.add(self.of_name(instruction))
                if instruction.opcode == "conditional":
                    found.update(self.of_branches(instruction))
                if instruction.opcode in ("conditional", "while", "call"):
                    for called in instruction.calls:
                        found |= self.of_computation(called)
            self._known[name] = frozenset(stage for stage in found if stage)
        return self._known[name]

    def _sends(self, name: str) -> bool:
        return any(
            instruction.opcode.removesuffix("-start") in _COUNTED
            or any(map(self._sends, instruction.calls))
            for instruction in self._computations[name].values()
        )
