"""The collectives of a compiled program: what, over which axes, when and how often."""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from onebit_jax.inspect import hlo
from onebit_jax.workers.stages import branches_in, stage_of
from onebit_jax.workers.transfers import ring_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

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
      bytes: the payload of one worker: its operands, for an all-gather the result.
      axes: the mesh axes it works over (none if it has groups of one); None where its
        groups are not those of any axes of the mesh.
      group_size: n, the number of workers in a group.
      times: how often it runs in a step.
      stage: name of the stage that it runs in, or 'every' if it runs in all. Those of
        a stage 'a' also run in a stage 'a/b', which has more.
      sent_bytes: the bytes each worker sends for it in a step, all times together.
    """

    op: str
    dtype: str
    bytes: int
    axes: tuple[str, ...] | None
    group_size: int
    times: int
    stage: str
    sent_bytes: int

    def repeated(self, times: int) -> Collective:
        """The same collective inside a loop that runs `times`."""
        return self._replace(
            times=self.times * times, sent_bytes=self.sent_bytes * times
        )


def is_of(stage: str, other: str) -> bool:
    """True for a stage that is another or inside of it, and so runs what that runs."""
    return other == "every" or f"{stage}/".startswith(f"{other}/")


def collectives(
    module: hlo.Module, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> tuple[tuple[Collective, ...], tuple[str, ...]]:
    """The collectives that a step runs, and the stages that the program contains."""
    stages = _Stages(module)
    named = stages.of_computation(module.entry)

    @functools.cache
    def run_by(computation: str) -> tuple[Collective, ...]:
        instructions = module.computations[computation]
        return sum((run_in(i, instructions) for i in instructions.values()), ())

    def run_in(
        instruction: hlo.Instruction, scope: dict[str, hlo.Instruction]
    ) -> tuple[Collective, ...]:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in _COUNTED:
            shapes = [scope[name].shape for name in instruction.operands]
            collective = _collective(opcode, instruction, shapes, mesh)
            # Outside of the branches of a stage a collective runs in every step,
            # whatever its name says, unless the program has one stage only.
            alone = _around(named) if stages.of_name(instruction) else None
            return (collective._replace(stage=alone) if alone else collective,)
        if opcode in _UNCOUNTED and "is_host_transfer=true" not in instruction.rest:
            raise NotImplementedError(
                f"the program contains a {opcode}, whose bytes its text does not tell: "
                "count them by hand, or use jax.lax.all_to_all or ppermute."
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

    return run_by(module.entry), stages.in_order(named)


def _run_by_branches(
    stages: list[str | None], branches: Iterable[tuple[Collective, ...]]
) -> tuple[Collective, ...]:
    """A conditional's collectives: each stage's branch, or else the heaviest branch."""
    if not any(stages):
        return max(branches, key=lambda run: sum(c.sent_bytes for c in run))
    return tuple(
        collective._replace(stage=stage)
        if stage and is_of(stage, collective.stage)
        else collective
        for stage, run in zip(stages, branches, strict=True)
        for collective in run
    )


def _run_by_loop(
    loop: hlo.Instruction,
    condition: tuple[Collective, ...],
    body: tuple[Collective, ...],
) -> tuple[Collective, ...]:
    times = loop.trip_count
    if times is None and (condition or body):
        raise ValueError(
            "XLA does not know how often a loop with collectives runs "
            f"({loop.op_name or 'unnamed'}): give it a static number of steps, as "
            "jax.lax.scan has."
        )
    times = times or 0
    return (
        *(collective.repeated(times + 1) for collective in condition),
        *(collective.repeated(times) for collective in body),
    )


def _collective(
    op: str,
    instruction: hlo.Instruction,
    shapes: list[str],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> Collective:
    """The account of one execution of a collective."""
    size = sum(map(hlo.size_in_bytes, shapes))
    if op == "collective-permute":
        pairs = hlo.source_target_pairs(instruction)
        axes = _varying_axes(pairs, mesh)
        n = math.prod(mesh.shape[axis] for axis in axes)
        sent = ring_bytes(op, size, n)
    else:
        groups = hlo.replica_groups(instruction, mesh.size)
        axes = _axes_of_groups(groups, mesh)
        n = max(map(len, groups))
        if op == "all-gather":
            size *= n
        sent = ring_bytes(op, size, n)
    dtypes = dict.fromkeys(dtype for shape in shapes for dtype in hlo.dtypes(shape))
    return Collective(op, "+".join(dtypes), size, axes, n, 1, "every", sent)


def _varying_axes(
    groups: hlo.Groups, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> tuple[str, ...]:
    """The axes along which the coordinates of a group's partitions vary."""
    ids = np.array(groups, int).reshape(len(groups), -1 if groups else 0)
    coordinates = np.stack(np.unravel_index(ids, mesh.axis_sizes))
    varies = (coordinates != coordinates[..., :1]).any(axis=(1, 2))
    return tuple(
        axis for axis, there in zip(mesh.axis_names, varies, strict=True) if there
    )


def _axes_of_groups(
    groups: hlo.Groups, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> tuple[str, ...] | None:
    """The axes whose groups these are, or None."""
    axes = _varying_axes(groups[:1], mesh)
    positions = [mesh.axis_names.index(axis) for axis in axes]
    n = math.prod(mesh.shape[axis] for axis in axes)
    ids = np.arange(mesh.size).reshape(mesh.axis_sizes)
    ids = np.moveaxis(ids, positions, range(-len(axes), 0)).reshape(-1, n)
    same = set(map(frozenset, ids.tolist())) == set(map(frozenset, groups))
    return axes if same else None


def _around(stages: Iterable[str]) -> str | None:
    """The stage that all of these are in, or None."""
    paths = [stage.split("/") for stage in stages]
    same = itertools.takewhile(
        lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)
    )
    return "/".join(parts[0] for parts in same) or None


class _Stages:
    """The stages that a module's computations belong to."""

    def __init__(self, module: hlo.Module):
        self._computations = module.computations
        self._of_computation: dict[str, frozenset[str]] = {}

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Stages in the order in which the program's choice between them has them."""
        stacks = [
            instruction.op_name
            for instructions in self._computations.values()
            for instruction in instructions.values()
        ]
        places = branches_in(stacks)

        def place(name: str) -> list[tuple[int, str]]:
            return [(places.get(part, -1), part) for part in name.split("/")]

        return tuple(sorted(names, key=place))

    def of_name(self, instruction: hlo.Instruction) -> str | None:
        """The stage that the name of an instruction tells."""
        return stage_of(instruction.op_name)

    def of_branches(self, conditional: hlo.Instruction) -> list[str | None]:
        """The stage that each branch is in; None for one of several or none."""
        branches = conditional.calls
        named = [self.of_computation(name) for name in branches]
        # XLA's combiner drops names: beside a named stage's branch, another that has
        # collectives and no name is one of a stage, too.
        return [
            UNNAMED
            if not each and any(named) and self._sends(branch)
            else _around(each)
            for each, branch in zip(named, branches, strict=True)
        ]

    def of_computation(self, name: str) -> frozenset[str]:
        """The stages named in a computation and in those that it runs.

        Not in its fusions and reductions, which XLA shares between equal ones.
        """
        if name not in self._of_computation:
            stages: set[str | None] = set()
            for instruction in self._computations[name].values():
                stages.add(self.of_name(instruction))
                if instruction.opcode == "conditional":
                    stages.update(self.of_branches(instruction))
                if instruction.opcode in ("conditional", "while", "call"):
                    for called in instruction.calls:
                        stages |= self.of_computation(called)
            self._of_computation[name] = frozenset(s for s in stages if s)
        return self._of_computation[name]

    def _sends(self, name: str) -> bool:
        return any(
            instruction.opcode.removesuffix("-start") in _COUNTED
            or any(map(self._sends, instruction.calls))
            for instruction in self._computations[name].values()
        )
