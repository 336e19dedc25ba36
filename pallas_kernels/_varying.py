"""Types under `shard_map(check_vma=True)`."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def vary_as(tree: Any, *others: Any) -> Any:
    """Types every array as varying over the mesh axes that others vary over."""
    axes = frozenset().union(*(varying(x) for x in jax.tree.leaves(others)))

    def cast(x: Any) -> Any:
        missing = tuple(sorted(axes - varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes that a value differs over by its type."""
    kind = jax.typeof(x).manual_axis_type
    return frozenset(kind.varying if kind else ())
