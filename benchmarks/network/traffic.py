"""A program's collectives: their bytes between hosts, and a program of them alone."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from onebit_jax import Transfer
from train.core.mesh import AXIS, DEVICE, HOST
from train.plan.cluster import link_load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array

    from onebit_jax import Collective
    from train.plan.cluster import LinkLoad

DTYPES = {
    "bf16": jnp.bfloat16,
    "f32": jnp.float32,
    "pred": jnp.uint8,
    "s32": jnp.int32,
    "u32": jnp.uint32,
    "u8": jnp.uint8,
}
"""Dtypes by HLO's names for them."""


def between_hosts(collectives: Sequence[Collective], hosts: int) -> list[Collective]:
    """Those of a program's collectives that send from host to host."""
    return [
        c for c in collectives if hosts > 1 and c.group_size > 1 and c.axes != (DEVICE,)
    ]


def host_loads(
    collectives: Sequence[Collective], hosts: int, devices: int
) -> list[LinkLoad]:
    """The loads that a program's collectives put on the links of hosts.

    Raises:
      NotImplementedError: The groups of a collective are not those of the mesh's axes.
    """
    # Hosts of one device each are the workers of a mesh of one axis.
    names = {AXIS: HOST, HOST: HOST, DEVICE: DEVICE}
    loads = []
    for each in collectives:
        if each.axes is None:
            raise NotImplementedError(f"cannot tell which hosts the {each.op} joins")
        axes = tuple(names[axis] for axis in each.axes)
        payload = each.bytes * each.times
        transfer = Transfer(each.op, payload, axes, each.times)
        loads.append(link_load(transfer, hosts, devices))
    return loads


def host_bytes(collectives: Sequence[Collective], hosts: int, devices: int) -> int:
    """The bytes that all devices of a host together send to other hosts."""
    loads = host_loads(collectives, hosts, devices)
    return sum(round(load.host_bytes) for load in loads)


def collectives_alone(
    collectives: Sequence[Collective], mesh: jax.sharding.Mesh
) -> tuple[Any, list[Array]]:
    """A program of a program's collectives, one after another, and its first buffers.

    It is jitted, and gives of donated buffers buffers like them and a value that
    depends on all collectives.

    Raises:
      NotImplementedError: A collective is unknown.
    """
    split = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, split)
    calls, buffers = [], []
    for each in collectives:
        if each.op not in _OPERATIONS or each.dtype not in DTYPES or not each.axes:
            raise NotImplementedError(f"cannot run the {each.dtype} {each.op} alone")
        dtype = jnp.dtype(DTYPES[each.dtype])
        count = each.bytes // dtype.itemsize
        if each.op == "all-gather":
            count //= each.group_size
        for _ in range(each.times):
            calls.append((_OPERATIONS[each.op], each.axes))
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
        for (call, axes), buffer in zip(calls, buffers, strict=True):
            # Each needs a number of the one before.
            buffer = buffer[0].at[0].add(done[0].astype(buffer.dtype))
            result = call(buffer, axes)
            done = result[-1:].astype(jnp.float32)
            after.append((result if result.shape == buffer.shape else buffer)[None])
        return after, done

    return program, buffers


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Array:
    part = sharding.shard_shape(shape)
    return jax.make_array_from_callback(
        shape, sharding, lambda _: np.zeros(part, dtype)
    )


_OPERATIONS = {
    "all-gather": lambda x, axes: lax.all_gather(x, axes, tiled=True),
    "all-reduce": lax.psum,
    "all-to-all": lambda x, axes: lax.all_to_all(x, axes, 0, 0, tiled=True),
    "reduce-scatter": lambda x, axes: lax.psum_scatter(x, axes, tiled=True),
}
"""From the name of a collective to the function of a buffer and its axes."""
