"""A program's collectives: what of them leaves a host, and a program of them alone."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array

    from onebit_jax import Collective

DTYPES = {
    "bf16": jnp.bfloat16,
    "f32": jnp.float32,
    "pred": jnp.uint8,
    "s32": jnp.int32,
    "u32": jnp.uint32,
    "u8": jnp.uint8,
}
"""From HLO's names."""


def leaves_host(each: Collective, hosts: int) -> bool:
    """Whether a collective is one between hosts."""
    return hosts > 1 and each.group_size > 1 and each.axes != ("device",)


def host_bytes(found: Sequence[Collective], hosts: int, devices: int) -> int:
    """The bytes that leave a host.

    A host's devices stand side by side in the rings, so that of a ring over all of
    them one edge leaves a host.

    Args:
      found: A program's collectives, of one stage.
      hosts: How many.
      devices: Of each.

    Returns:
      Bytes of all devices of a host together, to other hosts.
    """
    total = 0
    for each in found:
        if not leaves_host(each, hosts):
            continue
        edges = float(devices)
        if devices > 1 and each.group_size == hosts * devices:
            others = (hosts - 1) * devices / (hosts * devices - 1)
            edges = devices * others if each.op == "all-to-all" else 1.0
        total += round(each.sent_bytes * edges)
    return total


def collectives_alone(
    found: Sequence[Collective], mesh: jax.sharding.Mesh
) -> tuple[Any, list[Array]]:
    """A program of a program's collectives, one after another.

    Args:
      found: The collectives, of one stage.
      mesh: That they are of.

    Returns:
      A jitted function from donated buffers to buffers like them and to what shows
      that it is done; and the first buffers, zeros.

    Raises:
      NotImplementedError: If there is a collective that is not known here.
    """
    split = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, split)
    calls, buffers = [], []
    for each in found:
        if each.op not in _OPERATIONS or each.dtype not in DTYPES or not each.axes:
            raise NotImplementedError(f"cannot run the {each.dtype} {each.op} alone")
        dtype = jnp.dtype(DTYPES[each.dtype])
        count = each.bytes // dtype.itemsize
        if each.op == "all-gather":
            count //= each.group_size
        call = functools.partial(_OPERATIONS[each.op], axes=each.axes)
        for _ in range(each.times):
            calls.append(call)
            buffers.append(_zeros((mesh.size, count), dtype, sharding))

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=split,
        out_specs=(split, split),
        check_vma=False,
    )
    def program(buffers: list[Array]) -> tuple[list[Array], Array]:
        after, done = [], jnp.zeros(1, jnp.float32)
        for call, buffer in zip(calls, buffers, strict=True):
            # Each needs a number of the one before.
            buffer = buffer[0].at[0].add(done[0].astype(buffer.dtype))
            result = call(buffer)
            done = result[-1:].astype(jnp.float32)
            after.append((result if result.shape == buffer.shape else buffer)[None])
        return after, done

    return program, buffers


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Array:
    part = sharding.shard_shape(shape)
    return jax.make_array_from_callback(
        shape, sharding, lambda _: np.zeros(part, dtype)
    )


def _all_reduce(x: Array, axes: Any) -> Array:
    return lax.psum(x, axes)


def _all_gather(x: Array, axes: Any) -> Array:
    return lax.all_gather(x, axes, tiled=True)


def _all_to_all(x: Array, axes: Any) -> Array:
    return lax.all_to_all(x, axes, 0, 0, tiled=True)


def _reduce_scatter(x: Array, axes: Any) -> Array:
    return lax.psum_scatter(x, axes, tiled=True)


_OPERATIONS = {
    "all-gather": _all_gather,
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
    "reduce-scatter": _reduce_scatter,
}
