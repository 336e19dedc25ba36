"""The bytes that a compiled step sends, counted from its own collectives."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from onebit_jax.inspect import hlo
from onebit_jax.inspect.collectives import collectives, is_of

if TYPE_CHECKING:
    import jax

    from onebit_jax.inspect.collectives import Collective


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
        """Bytes each worker sends in one step.

        Args:
          stage: name of a stage; may be left out where the program does the same in
            each step. Of a program without stages any name means all of it.
          axis: count only the collectives over this mesh axis. One that works over
            several axes at once counts for each of them.

        Returns:
          A number of bytes; the most that any worker sends, where they differ.

        Raises:
          ValueError: if the stage must be named or is not one of the program's, if the
            axis is not in the mesh, or if a collective belongs to no axis.

        Example:
          >>> from onebit_jax.inspect.collectives import Collective
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
        kinds = Counter(self.collectives)
        for kind, count in kinds.items():
            op, dtype, size, axes, n, times, stage, sent = kind
            where = "?" if axes is None else ",".join(axes) or "-"
            numbers = (f"{size:,}", where, str(n), str(times * count))
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
                f"a worker sends {self.sent_bytes(stage):,} bytes a step{name}"
            )
        return "\n".join(lines)


def traffic(compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> Traffic:
    r"""The bytes each worker sends in one step, by collective, mesh axis and stage.

    They are read off the optimised program, so they include what the partitioner
    added and what XLA combined, moved out of loops or widened (on CPU, an all-reduce
    of bfloat16 becomes one of float32). Of a payload of :math:`b` bytes in a group of
    :math:`n` workers, a worker sends, by the algorithms that send least (rings):

    ====================  ============================================
    all-reduce            :math:`2 b (n - 1) / n`
    reduce-scatter        :math:`b (n - 1) / n`
    all-to-all            :math:`b (n - 1) / n`
    all-gather            :math:`b (n - 1) / n`, :math:`b` of the result
    collective-permute    :math:`b`
    collective-broadcast  :math:`b`
    ====================  ============================================

    rounded up to whole bytes. Of a conditional other than the stage's (skipping a
    step, accumulating gradients) the branch that sends most counts as run. A
    collective inside a kernel or a callback cannot be seen.

    Args:
      compiled: a compiled step, as `jax.jit(step).lower(...).compile()`.
      mesh: the mesh it was compiled for.

    Returns:
      The collectives, with their sums by stage and axis.

    Raises:
      ValueError: if the program was compiled for another number of devices, the backend
        gives no text of its programs, or a loop with collectives has no trip count
        known to XLA.
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
    text = compiled.as_text()
    if text is None:
        raise ValueError(
            "this backend does not give the text of its programs: count an optimizer's "
            "bytes with onebit_jax.stage_costs."
        )
    module = hlo.parse(text)
    if module.size != mesh.size:
        raise ValueError(
            f"the program was compiled for {module.size} devices and the mesh has "
            f"{mesh.size}: give the mesh that it was compiled for."
        )
    all_collectives, stages = collectives(module, mesh)
    return Traffic(all_collectives, stages, mesh.axis_names)
