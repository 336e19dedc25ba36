"""Sums, means and gathers that several modules need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from onebit_jax.workers.axes import is_recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax import Array
    from jaxtyping import Float32, Int32


def mean(x: Any, axes: tuple[str, ...]) -> Any:
    """The exact mean over the workers, in one all-reduce.

    Of the value's dtype, but in float32 for float16, which cannot hold the sum of large
    values nor a worker's part of small ones, and for any 16 bits where other mesh axes
    are automatic: XLA's CPU backend (jax 0.10 to 0.12) ends the process otherwise.
    """
    types = jax.sharding.get_abstract_mesh().axis_types
    if x.dtype == jnp.float16 or (
        x.dtype.itemsize == 2 and set(types) - {AxisType.Manual}
    ):
        return lax.pmean(x.astype(jnp.float32), axes).astype(x.dtype)
    return lax.pmean(x, axes)


SMALL = 16_384
"""Leaves of fewer values are encoded together."""


def means(tree: Any, axes: tuple[str, ...]) -> Any:
    """The exact means of a tree; the compiler puts the all-reduces together."""
    return jax.tree.map(lambda x: mean(x, axes), tree)


def ordered_after(x: Array, tree: Any) -> Array:
    """A value that on a CPU is not known before the leaves of a tree are.

    XLA's CPU devices (jax 0.10 to 0.12) run collectives that do not depend on each
    other in any order, and mistake one for another over the same devices: the process
    ends.

    Args:
      x: the value.
      tree: what collectives give, the same on all workers. Beside automatic or explicit
        mesh axes it is not looked at, as single values of divided arrays need more
        collectives.

    Returns:
      x, on a CPU plus a zero that depends on the tree.
    """
    if set(jax.sharding.get_abstract_mesh().axis_types) - {AxisType.Manual}:
        return x

    def on_cpu(x: Array, *leaves: Array) -> Array:
        firsts = [
            lax.bitcast_convert_type(y.reshape(-1)[0].astype(jnp.float32), jnp.int32)
            for y in leaves
        ]
        # A sum of all at once takes time that grows with the square of their number.
        parts: list[Any] = [sum(firsts[k : k + 32]) for k in range(0, len(firsts), 32)]
        parts = made_once(parts) if len(parts) > 1 else parts
        odd = jnp.asarray(sum(parts, start=jnp.int32(0)) & 1)
        # XLA does not see that it is a constant.
        return x + (odd * (1 - odd)).astype(x.dtype)

    leaves = [y for y in jax.tree.leaves(tree) if y.size]
    return lax.platform_dependent(x, *leaves, cpu=on_cpu, default=lambda x, *_: x)


def made_once(tree: Any) -> Any:
    """Small values that much else is computed from, made once.

    XLA would compute them again in the kernel of each leaf that uses them. On a CPU it
    then compiles for a time that grows with the square of their number.
    """

    def through_a_loop(tree: Any) -> Any:
        # Hidden from the compiler, which removes a loop that runs once.
        once = lax.optimization_barrier(jnp.int32(1))

        def same(i: Array, tree: Any) -> Any:
            never = i < 0
            return jax.tree.map(lambda x: lax.select(never, jnp.zeros_like(x), x), tree)

        return lax.fori_loop(0, once, same, tree)

    return lax.platform_dependent(
        tree, cpu=through_a_loop, default=lax.optimization_barrier
    )


def hidden(numbers: Sequence[int]) -> list[Int32[Array, ""]]:
    """Integers that the compiler does not see.

    Kernels that differ in such a number alone, as those of equal leaves in one buffer
    do, are one kernel to compile.
    """
    return made_once([jnp.int32(number) for number in numbers])


def parted(tree: Any, starts: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """Parts of arrays along their first dimension, by first places and sizes."""
    # Of places beyond what 32 bits hold the compiler must know.
    longest = max(x.size for x in jax.tree.leaves(tree))
    places = hidden(starts) if longest < 2**31 else starts

    def part(place: Any, size: int) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, place, size), tree)

    return list(map(part, places, sizes))


def row(of_leaf: Callable[..., Array], *trees: Any) -> Float32[Array, " leaves"]:
    """A number of each leaf, in their order; a zero where there is none.

    Orbax saves no empty arrays.
    """
    numbers = jax.tree.leaves(jax.tree.map(of_leaf, *trees))
    return jnp.stack(list(map(replicated, numbers)) or [jnp.float32(0)])


def numbers_of(tree: Any, *rows: Float32[Array, " leaves"]) -> tuple[Any, ...]:
    """For each row, a tree of its numbers, each in the place of its leaf in a tree."""
    treedef = jax.tree.structure(tree)
    places = hidden(range(treedef.num_leaves))
    return tuple(
        treedef.unflatten(
            [lax.dynamic_index_in_dim(row, i, keepdims=False) for i in places]
        )
        for row in rows
    )


def gather(x: Array, axes: tuple[str, ...], **options: Any) -> Array:
    """`jax.lax.all_gather`, of a type that says that all workers have the same."""
    if is_recorded(axes):
        options["to"] = "invarying"
    return lax.all_gather(x, axes, **options)


def replicated(x: Array) -> Array:
    """A small value as each device inside a worker is to hold it: not divided."""
    types = jax.sharding.get_abstract_mesh().axis_types
    # Automatic axes would divide it, and gather it again for every use.
    return lax.with_sharding_constraint(x, P()) if AxisType.Auto in types else x


def squared_norm(tree: Any) -> Float32[Array, ""]:
    """The sum of squares over all leaves, in float32."""
    leaves = jax.tree.leaves(tree)
    squares = (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves)
    return sum(squares, start=jnp.float32(0))
