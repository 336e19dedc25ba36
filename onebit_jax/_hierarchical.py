"""An exchange in two levels: exact inside a host, compressed between hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from onebit_jax import _axes
from onebit_jax._compressed import Leaves, SignMeanState, check_floats, divide
from onebit_jax._exact_leaves import own_value
from onebit_jax._exchange import Exchange
from onebit_jax._per_worker import PerWorker
from onebit_jax._wire import Part, Tails

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32

    from onebit_jax._blocks import BlockLayout


def hierarchical(exchange: Exchange, within: _axes.AxisNames) -> Exchange:
    r"""Averages exactly inside each host, and by a given exchange between hosts.

    With H hosts of D devices, each device d of a host h gets one of D shares of the
    host's exact mean (a reduce-scatter), exchanges that share with the same device of
    the other hosts, and gives the other devices of its host what was agreed, still
    compressed (an all-gather):

    .. math::
      x^{(h)} = \tfrac1D \textstyle\sum_d x^{(h, d)}, \quad
      \bar x = E[x^{(1)}, \dots, x^{(H)}]

    A device sends 1/D of what `exchange` alone would send between hosts. The hosts
    are the workers that errors are remembered for: each holds one error, divided
    among its devices, instead of D.

    Args:
      exchange: between hosts: `sign_mean` or `count_mean` over their axis.
      within: name, or names, of the mesh axes of the devices inside a host.

    Returns:
      An exchange over the axes of both. Its state is a `SignMeanState` with errors by
      block, in the order of the leaves: worker errors of shape (H, H, D * blocks
      served, block_size), server errors of (H, D * blocks served, block_size).

    Raises:
      TypeError: if `exchange` has no wire format of its own, as `exact_mean` has not.
      ValueError: if both name the same axis.

    Example:
      >>> import jax, onebit_jax
      >>> exchange = hierarchical(onebit_jax.sign_mean('host'), within='device')
      >>> exchange.axes
      ('host', 'device')

    References:
      Lu et al., BinSGDM, 2023, https://openreview.net/forum?id=Mlo2kM11ZB, for a
      hierarchical 1-bit all-reduce.
    """
    wire = getattr(exchange, "wire", None)
    if wire is None:
        raise TypeError(
            "hierarchical needs an exchange between hosts with a wire format, such as "
            f"sign_mean('host'), got {exchange!r}."
        )
    between, inside = wire.axes, _axes.as_tuple(within)
    if set(between) & set(inside):
        raise ValueError(
            f"the axes between hosts {between} and inside them {inside} must differ."
        )
    axes = (*between, *inside)
    specs = (
        (PartitionSpec(between, None, inside),),
        (PartitionSpec(between, inside),),
    )

    def state_of(worker: Array, server: Array | None) -> SignMeanState:
        return SignMeanState(
            worker_error=PerWorker(worker, axes, "each", specs[0]),
            server_error=PerWorker(server, axes, "split", specs[1]),
        )

    def shapes_of(
        layout: BlockLayout, hosts: int, held: int, held_inside: int
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        served = layout.served_blocks * held_inside
        server = (held, served, wire.block_size) if wire.has_server else None
        return (held, hosts, served, wire.block_size), server

    def init_fn(params: optax.Params) -> SignMeanState:
        hosts, held = _axes.worker_count(between)
        devices, held_inside = _axes.worker_count(inside)
        check_floats(params, wire)
        shapes = [p.shape for p in jax.tree.leaves(params)]
        _, _, layout = divide(shapes, wire, hosts * devices)
        worker, server = shapes_of(layout, hosts, held, held_inside)
        return state_of(
            jnp.zeros(worker, wire.error_dtype),
            None if server is None else jnp.zeros(server, wire.error_dtype),
        )

    def exchange_tree(
        updates: optax.Updates, momentum: Any, decay: Any, state: SignMeanState
    ) -> tuple[optax.Updates, SignMeanState]:
        hosts, devices = _axes.bound_workers(between), _axes.bound_workers(inside)
        _axes.check_local(updates, axes, f"hierarchical {wire.who}")
        values, treedef = jax.tree.flatten(updates)
        momenta = treedef.flatten_up_to(momentum)
        leaves = Leaves.of(values, momenta, decay, wire, hosts * devices)
        layout = leaves.layout
        error, server_error = state.worker_error.value, state.server_error.value
        found = (error.shape, None if server_error is None else server_error.shape)
        fits = found == shapes_of(layout, hosts, 1, 1)
        _axes.check_workers(fits, f"hierarchical {wire.who}", hosts * devices, axes)

        results = leaves.exact_results(axes)
        if leaves.compressed:
            served = layout.served_blocks
            bucket = _bucket(leaves).reshape(hosts, devices * served, -1)
            share = lax.psum_scatter(bucket, inside, scatter_dimension=1, tiled=True)
            own = _axes.worker_index(inside)
            counts = layout.counts().reshape(hosts, devices, served)
            counts = lax.dynamic_index_in_dim(counts, own, 1, keepdims=False)
            part = Part(
                (share / devices).reshape(-1),
                # The blocks' tails change it after it was rounded otherwise.
                error.reshape(-1).astype(jnp.float32),
                tails=_tails(layout, hosts, devices, own),
            )
            message, (new_error,), server_error = wire.exchange(
                [part], None, counts.reshape(-1), server_error
            )
            error = new_error.reshape(error.shape).astype(error.dtype)
            message = lax.all_gather(
                message.reshape(hosts, served, -1),
                inside,
                axis=1,
                tiled=True,
                to="invarying",
            ).reshape(hosts * devices * served, -1)
            for i, rows in zip(leaves.compressed, layout.slices, strict=True):
                results[i] = leaves.result(i, wire, message[rows])
        return treedef.unflatten(results), state_of(error, server_error)

    return Exchange.of_momentum(init_fn, exchange_tree, axes, delay=exchange.delay)


def _bucket(leaves: Leaves) -> Float32[Array, "blocks block_size"]:
    """What a worker has to send, whole, as blocks."""
    layout, rows = leaves.layout, []
    for i, blocks in zip(leaves.compressed, layout.blocks, strict=True):
        value = own_value(leaves.values[i], leaves.momenta[i], leaves.decay)
        padding = blocks * layout.block_size - value.size
        rows.append(jnp.pad(value.reshape(-1), (0, padding)))
    unused = layout.total_blocks - sum(layout.blocks)
    rows.append(jnp.zeros(unused * layout.block_size, jnp.float32))
    return jnp.concatenate(rows).reshape(-1, layout.block_size)


def _tails(layout: BlockLayout, hosts: int, devices: int, own: Array) -> Tails:
    """Where the leaves' last blocks are in this device's share of the bucket."""
    cut = [
        (part.stop - 1, size % layout.block_size)
        for part, size in zip(layout.slices, layout.sizes, strict=True)
        if size % layout.block_size
    ]
    places, counts = np.array(cut, np.int32).reshape(-1, 2).T
    served = layout.served_blocks
    host, rest = np.divmod(places, devices * served)
    device, place = np.divmod(rest, served)
    here = jnp.asarray(device) == own
    elsewhere = jnp.int32(hosts * served)
    return Tails(
        jnp.where(here, jnp.asarray(host * served + place), elsewhere),
        jnp.asarray(counts),
    )
