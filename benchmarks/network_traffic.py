"""A program's collectives: what of them leaves a host, and a program of them alone."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    if hosts == 1:
        return 0
    total = 0
    for each in found:
        if each.group_size == hosts * devices and devices > 1:
            others = (hosts - 1) * devices / (hosts * devices - 1)
            edges = devices * others if each.op == "all-to-all" else 1
            total += round(each.sent_bytes * edges)
        elif each.axes != ("device",):
            total += each.sent_bytes * devices
    return total


def collectives_alone(
    found: Sequence[Collective], mesh: jax.sharding.Mesh
) -> Callable[[], Any]:
    """Runs a program's collectives one after another, on zeros, in place.

    Args:
      found: The collectives, of one stage.
      mesh: That they are of.

    Returns:
      A function that runs them once.

    Raises:
      NotImplementedError: If there is one that is not known here.
    """
    split = PartitionSpec(mesh.axis_names)
    calls, buffers = [], []
    for each in (each for each in found if each.axes):
        if each.op not in _OPERATIONS or each.dtype not in DTYPES:
            raise NotImplementedError(f"cannot run the {each.dtype} {each.op} alone")
        dtype = DTYPES[each.dtype]
        count = max(1, each.bytes // jnp.dtype(dtype).itemsize)
        if each.op == "all-gather":
            count //= each.group_size
        calls += [functools.partial(_OPERATIONS[each.op], axes=each.axes)] * each.times
        shape = mesh.size, -(-count // each.group_size) * each.group_size
        if each.op == "all-gather":
            shape = mesh.size, count
        buffers += [jnp.zeros(shape, dtype)] * each.times

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
    )
    def program(buffers: list[Array]) -> list[Array]:
        done, after = jnp.uint8(0), []
        for call, buffer in zip(calls, buffers, strict=True):
            # Each waits for the one before.
            buffer, _ = lax.optimization_barrier((buffer[0], done))
            result = call(buffer)
            done = result[0].astype(jnp.uint8)
            same = result.shape == buffer.shape
            after.append((result if same else buffer)[None])
        return [x + done.astype(x.dtype) if x.size < 64 else x for x in after]

    sharding = jax.sharding.NamedSharding(mesh, split)
    held = [
        jax.make_array_from_callback(
            x.shape, sharding, lambda index, x=x: jnp.zeros_like(x[index])
        )
        for x in buffers
    ]

    def run() -> Any:
        nonlocal held
        held = program(held)
        return held

    return run


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
