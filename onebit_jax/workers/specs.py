"""The mesh axes that a partition names."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec


def is_spec(node: object) -> bool:
    """True of a node that is a partition; for `is_leaf`."""
    return isinstance(node, PartitionSpec)


def entry_names(entry: Any) -> tuple[str, ...]:
    """The axes that one dimension is divided over."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def names_of(spec: PartitionSpec) -> set[str]:
    """The axes that any dimension is divided over."""
    return {name for entry in spec for name in entry_names(entry)}
