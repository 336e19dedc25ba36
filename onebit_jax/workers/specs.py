"""The mesh axes that a partition names."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def context_of(mesh: AbstractMesh) -> Iterator[None]:
    """A context of a mesh, whatever mesh the caller has set."""
    # JAX refuses a mesh of another size in one that is set, and takes none in any.
    none = AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(mesh):
        yield


def is_spec(node: object) -> bool:
    """True of a node that is a partition; for `is_leaf`."""
    return isinstance(node, PartitionSpec)


def entry_names(entry: Any) -> tuple[str, ...]:
    """The axes that one dimension is divided over."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def names_of(spec: PartitionSpec) -> set[str]:
    """The axes that any dimension is divided over."""
    return {name for entry in spec for name in entry_names(entry)}


def over(axes: set[str], spec: PartitionSpec) -> PartitionSpec:
    """The part of a partition over the workers; `shard_map` leaves the rest alone."""
    kept = [entry if names_of(PartitionSpec(entry)) <= axes else None for entry in spec]
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def spec_of(x: Any) -> PartitionSpec:
    """The partition of an array or a shape, of no axes where it has none."""
    sharding = getattr(x, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def typed_spec(x: Any) -> PartitionSpec:
    """The partition over explicit axes, which a traced value's type tells."""
    return spec_of(jax.typeof(x)) if isinstance(x, Tracer) else PartitionSpec()


def sharding_of(mesh: Mesh | AbstractMesh, spec: PartitionSpec, ndim: int) -> Any:
    """The sharding of an array as a step returns it, which is compiled once so.

    Over explicit axes types, and what a program returns, have an entry for each
    dimension; over others none after the last that is divided.
    """
    entries = [*spec]
    while entries and entries[-1] is None:
        entries.pop()
    if mesh.abstract_mesh.explicit_axes and not names_of(spec) & set(
        mesh.abstract_mesh.auto_axes
    ):
        entries += [None] * (ndim - len(entries))
    return NamedSharding(mesh, PartitionSpec(*entries))


def explicit(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    """The mesh with explicit axes, over which types tell how a value is sharded."""
    mesh = mesh.abstract_mesh
    types = (AxisType.Explicit,) * len(mesh.axis_names)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LeafSpecs:
    """The partitions of a tree's leaves, in their order; a tree without leaves.

    Attributes:
      places: the leaves' paths.
      specs: their partitions over axes that are not the workers'.
    """

    places: tuple[str, ...]
    specs: tuple[PartitionSpec, ...]
