"""Python values in a step's arguments, compiled in.

A module's tree has arrays, and functions, flags and sizes beside them. These are made
part of the tree's structure, so that `jax.jit` takes them as constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A node without arrays, compiled in."""

    value: Any

    def __eq__(self, other: object) -> bool:
        # 1, 1.0 and True are equal, and not the same program.
        return (
            isinstance(other, Static)
            and type(self.value) is type(other.value)
            and self.value == other.value
        )

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def arrays_alone(tree: Any, counts: frozenset[int] = frozenset()) -> Any:
    """A tree whose leaves are arrays, what is none being part of its structure.

    Args:
      tree: any.
      counts: places of leaves that are arrays whatever they are.

    Returns:
      The tree, with what is no array in `Static` nodes.

    Raises:
      TypeError: for a `jax.Ref`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if any(isinstance(x, jax.Ref) for x in leaves):
        raise TypeError(
            "a jax.Ref cannot be carried through a step: pass its array, ref[...], and "
            "set the Ref to what the step returns."
        )
    return treedef.unflatten(
        [
            x
            if isinstance(x, _ARRAYS) or (i in counts and type(x) is int)
            else Static(x)
            for i, x in enumerate(leaves)
        ]
    )


def with_leaves(tree: Any) -> Any:
    """The inverse of `arrays_alone`."""
    return jax.tree.map(
        lambda x: x.value if _is_static(x) else x, tree, is_leaf=_is_static
    )


def _is_static(node: Any) -> bool:
    return isinstance(node, Static)


def by_name(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, what is no array or number being part of the structure.

    Raises:
      TypeError: if that is not hashable.
    """

    def held(path: Any, x: Any) -> Any:
        is_number = isinstance(x, (*_ARRAYS, int, float, complex))
        if is_number and not isinstance(x, bool):
            return x
        if not isinstance(x, Hashable):
            # What changes in place would be taken for what was compiled in.
            name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
            raise TypeError(
                f"{name} is compiled in and must be hashable, as a frozen dataclass "
                f"is, got {x!r}."
            )
        return Static(x)

    # The stage is static by its name.
    named = {k: x for k, x in options.items() if k != "stage"}
    return {**options, **jax.tree.map_with_path(held, named)}


class CountsError(Exception):
    """The step changes integers of Python's, at these places among the leaves."""

    def __init__(self, places: frozenset[int]):
        super().__init__(places)
        self.places = places


def check_counts(carried: Any, anew: Any) -> None:
    """Tells of integers in place of which the step returns something else."""
    before, after = (
        jax.tree.flatten(tree, is_leaf=_is_static) for tree in (carried, anew)
    )
    if before[1] == after[1]:
        both = enumerate(zip(before[0], after[0], strict=True))
        changed = frozenset(i for i, (x, y) in both if _is_count(x) and x != y)
        if changed:
            raise CountsError(changed)


def _is_count(node: Any) -> bool:
    return isinstance(node, Static) and type(node.value) is int
