"""A check that replicas are bit-identical, made on the devices that hold them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax.workers.axes import as_tuple
from onebit_jax.workers.specs import names_of

if TYPE_CHECKING:
    from jaxtyping import PyTree, Shaped, UInt32

    from onebit_jax.workers.axes import AxisNames

_SEEDS = (0x243F6A88, 0x85A308D3)


def replica_mismatches(
    tree: PyTree[Shaped[jax.Array, " ..."]],
    mesh: jax.sharding.Mesh,
    axis: AxisNames | None = None,
) -> dict[str, list[int]]:
    """The arrays of a tree whose replicas differ, and the workers where they do.

    Each device takes a 64-bit fingerprint of the bits of its own copy; only these are
    compared. Signs of zeros, payloads of NaNs and the order of elements count. An
    array is compared over those of the axes that its sharding does not split it over,
    so state of each worker's own (`WorkerLocal`) has nothing to be compared with. Works
    across processes; all of them must call it.

    Args:
      tree: arrays placed on the mesh, of any dtype, PRNG keys included.
      mesh: the mesh that they are placed on.
      axis: the mesh axis, or axes, of the workers; all axes if left out.

    Returns:
      For each array with a replica that differs from the first worker's, its path in
      the tree, as `jax.tree_util.keystr` writes it, and the workers that differ,
      numbered along `axis`. Empty if the replicas are identical.

    Raises:
      ValueError: if an axis is not in the mesh, or a leaf is not placed on the mesh.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh(
      ...     (jax.device_count(),), ('data',), axis_types=(AxisType.Auto,))
      >>> params = jax.device_put({'w': jnp.ones(3)}, NamedSharding(mesh, P()))
      >>> replica_mismatches(params, mesh)
      {}
    """
    axes = as_tuple(mesh.axis_names if axis is None else axis)
    for name in axes:
        if name not in mesh.axis_names:
            raise ValueError(
                f"the mesh has axes {mesh.axis_names}, not {name!r}: name one of these."
            )
    arrays: dict[str, jax.Array] = {}
    specs: list[P] = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} is not placed on this mesh: use "
                "jax.device_put(tree, NamedSharding(mesh, spec)) first."
            )
        arrays[jax.tree_util.keystr(path)] = leaf
        specs.append(sharding.spec)
    if not arrays:
        return {}
    own = _fingerprint(mesh, tuple(specs))([*arrays.values()])
    names = (*axes, *(name for name in mesh.axis_names if name not in axes))
    order = [mesh.axis_names.index(name) for name in names]
    prints = np.asarray(_gather(mesh)(own)).transpose(*order, -2, -1)
    mismatches = {}
    for k, (path, spec) in enumerate(zip(arrays, specs, strict=True)):
        compared = set(axes) - names_of(spec)
        first = tuple(slice(0, 1) if n in compared else slice(None) for n in names)
        mine = prints[..., k, :]
        differs = (mine != mine[first]).any(axis=tuple(range(len(axes), mine.ndim)))
        if differs.any():
            mismatches[path] = np.flatnonzero(differs).tolist()
    return mismatches


def assert_replicas_identical(
    tree: PyTree[Shaped[jax.Array, " ..."]],
    mesh: jax.sharding.Mesh,
    axis: AxisNames | None = None,
) -> None:
    """Raises an error unless all replicas of all arrays of a tree are bit-identical.

    Args:
      tree: as of `replica_mismatches`.
      mesh: as of `replica_mismatches`.
      axis: as of `replica_mismatches`.

    Raises:
      AssertionError: naming the arrays and the workers that differ from the first.
      ValueError: as `replica_mismatches` does.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> everywhere = jax.NamedSharding(mesh, jax.P())
      >>> assert_replicas_identical(jax.device_put(jnp.ones(3), everywhere), mesh)
    """
    mismatches = replica_mismatches(tree, mesh, axis)
    if mismatches:
        shown = [f"{path} on workers {who}" for path, who in mismatches.items()]
        more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
        raise AssertionError(
            f"replicas differ from worker 0's in {'; '.join(shown[:8])}{more}"
        )


@functools.cache
def _fingerprint(mesh: jax.sharding.Mesh, specs: tuple[P, ...]):
    """A function from arrays to (*mesh, len(specs), 2): each device's fingerprints."""

    def local(leaves: list[jax.Array]) -> UInt32[jax.Array, " ..."]:
        prints = jnp.stack([_fingerprint_of(leaf) for leaf in leaves])
        return prints.reshape((1,) * mesh.devices.ndim + prints.shape)

    # No collective in here: XLA may assume that replicated arguments are equal on all
    # devices, and would be right to simplify one that compares them.
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(list(specs),), out_specs=P(*mesh.axis_names)
        )
    )


@functools.cache
def _gather(mesh: jax.sharding.Mesh):
    return jax.jit(lambda prints: prints, out_shardings=NamedSharding(mesh, P()))


def _fingerprint_of(x: Shaped[jax.Array, " ..."]) -> UInt32[jax.Array, " 2"]:
    words = _words(x)
    position = lax.iota(jnp.uint32, words.size)
    # Each word is scrambled with its place before it is added. In a sum of multiples,
    # flipping two signs (2**31, twice) would cancel.
    return jnp.stack(
        [
            jnp.sum(_scramble(words + _scramble(position ^ jnp.uint32(seed))))
            for seed in _SEEDS
        ]
    )


def _words(x: Shaped[jax.Array, " ..."]) -> UInt32[jax.Array, " words"]:
    """The bits of an array as 32-bit words, at least one an element."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([jnp.real(x), jnp.imag(x)])
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = min(32, jax.dtypes.itemsize_bits(x.dtype))
    return lax.bitcast_convert_type(x, f"uint{bits}").ravel().astype(jnp.uint32)


def _scramble(x: UInt32[jax.Array, " words"]) -> UInt32[jax.Array, " words"]:
    """MurmurHash3's finalizer: a bijection each bit of which depends on all bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
