"""An exchange in two levels: exact inside a host, compressed between hosts."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from onebit_jax.exchanges.block_exchange import BlockExchange, Buffer
from onebit_jax.exchanges.exchange import Exchange
from onebit_jax.exchanges.per_shard import PerShard
from onebit_jax.exchanges.shards import NESTED, add_shard_axis, of_shard, put_shard
from onebit_jax.workers.arithmetic import gather, mean, means
from onebit_jax.workers.axes import (
    AxisNames,
    as_tuple,
    bound_workers,
    check_floats,
    check_local,
    check_workers,
    worker_count,
)
from onebit_jax.workers.worker_local import WorkerLocal

if TYPE_CHECKING:
    from jax import Array

    from onebit_jax.exchanges.blocks import BlockLayout


def hierarchical(exchange: Exchange, within: AxisNames) -> Exchange:
    r"""Averages exactly inside each host, and by a given exchange between hosts.

    With H hosts of D devices, each device d of a host h gets one of D shares of the
    host's exact mean (a reduce-scatter). It exchanges that share with the same device
    of the other hosts. Then it gives the other devices of its host what was agreed (an
    all-gather, of the compressed message where the exchange is one of blocks):

    .. math::
      x^{(h)} = \tfrac1D \textstyle\sum_d x^{(h, d)}, \quad
      \bar x = E[x^{(1)}, \dots, x^{(H)}]

    A device sends 1/D of what `exchange` alone would send between hosts. The hosts
    are the workers that errors are remembered for: each holds one error, divided
    among its devices, instead of D.

    Args:
      exchange: between hosts, over their axis, such as `sign_mean('host')`.
      within: name, or names, of the mesh axes of the devices inside a host.

    Returns:
      An exchange over the axes of both. Of an exchange of blocks its state is a
      `HierarchicalState`. Of any other it is that exchange's, for flat shares of the
      leaves, with an axis of D devices after that of the hosts.

    Raises:
      TypeError: if `exchange` is not an exchange, or is `hierarchical` or `per_shard`
        itself.
      ValueError: if both name the same axis.

    Example:
      >>> import onebit_jax
      >>> exchange = hierarchical(onebit_jax.sign_mean('host'), within='device')
      >>> exchange.axes
      ('host', 'device')

    References:
      Lu et al., BinSGDM, 2023, https://openreview.net/forum?id=Mlo2kM11ZB, for a
      hierarchical 1-bit all-reduce.
    """
    if not isinstance(exchange, Exchange):
        raise TypeError(
            "hierarchical needs an exchange between hosts, such as sign_mean('host'), "
            f"got {exchange!r}."
        )
    if isinstance(exchange, (_Hierarchical, PerShard)):
        raise TypeError(NESTED)
    inside = as_tuple(within)
    if set(exchange.axes) & set(inside):
        raise ValueError(
            f"the axes between hosts {exchange.axes} and inside them {inside} must "
            "differ."
        )
    kind = _OfBlocks if isinstance(exchange, BlockExchange) else _OfLeaves
    return kind(exchange, inside, (*exchange.axes, *inside))


class HierarchicalState(NamedTuple):
    """The errors of an exchange of blocks between hosts of several devices.

    Attributes:
      worker_error: (hosts, hosts, devices * blocks served, block_size): of each host's
        mean, the part that its messages have not carried yet.
      server_error: (hosts, devices * blocks served, block_size): of each host's
        averages as a server; no array in an exchange without servers.
    """

    worker_error: WorkerLocal
    server_error: WorkerLocal


@dataclasses.dataclass(frozen=True)
class _Hierarchical(Exchange):
    exchange: Any
    inside: tuple[str, ...]
    axes: tuple[str, ...]

    @property
    def keeps_scale(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The exchange's between hosts."""
        return self.exchange.keeps_scale

    @property
    def senders(self) -> tuple[str, ...]:
        """The hosts'."""
        return self.exchange.axes

    def is_exact(self, shape: tuple[int, ...]) -> bool:
        """The exchange's between hosts."""
        return self.exchange.is_exact(shape)

    def is_alone(self) -> bool:
        """True of one host, whose devices exchange exactly."""
        return self.exchange.is_alone()


class _OfLeaves(_Hierarchical):
    """Of any exchange: it is given flat shares of the leaves."""

    def is_exact(self, shape: tuple[int, ...]) -> bool:
        """The exchange's of a flat share."""
        devices, _ = worker_count(self.inside)
        return self.exchange.is_exact((-(-math.prod(shape) // devices),))

    def init(self, params: optax.Params) -> Any:
        devices, slices = worker_count(self.inside)
        # The shapes of a device's flat shares of leaves.
        shares = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct((-(-p.size // devices),), jnp.float32),
            params,
        )
        state = self.exchange.init(shares)
        return add_shard_axis(state, slices, self.inside, inside=True)

    def update(
        self, updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        devices = bound_workers(self.inside)
        check_local(updates, self.axes, "hierarchical")

        def share(x: Array) -> Array:
            if not x.size:
                return x.reshape(-1).astype(jnp.float32)
            flat = jnp.pad(x.reshape(-1), (0, -x.size % devices))
            total = lax.psum_scatter(flat.astype(jnp.float32), self.inside, tiled=True)
            return total / devices

        def gathered(mean: Array, x: Array) -> Array:
            if not x.size:
                # An empty leaf needs only the type of an agreed value.
                return lax.pmean(x, self.axes)
            mean = mean.astype(x.dtype)
            flat = gather(mean, self.inside, tiled=True)
            return flat[: x.size].reshape(x.shape)

        means, new = self.exchange.update(
            jax.tree.map(share, updates), of_shard(state, self.exchange.axes)
        )
        return jax.tree.map(gathered, means, updates), put_shard(state, new)


class _OfBlocks(_Hierarchical):
    """Of an exchange of blocks: each device has its share of the blocks.

    Inside a host the compressed message is gathered, and not what it stands for.
    """

    exchange: BlockExchange

    def init(self, params: optax.Params) -> HierarchicalState:
        hosts, slices = worker_count(self.exchange.axes)
        devices, slices_inside = worker_count(self.inside)
        check_floats(params, self.exchange.name)
        shapes = [p.shape for p in jax.tree.leaves(params)]
        layout = self.exchange.divide(shapes, hosts * devices).layout
        worker, server = self._shapes(layout, hosts, slices, slices_inside)
        dtype = self.exchange.error_dtype
        zeros = None if server is None else jnp.zeros(server, dtype)
        return self._state(jnp.zeros(worker, dtype), zeros)

    def update(
        self,
        updates: optax.Updates,
        state: HierarchicalState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, HierarchicalState]:
        del params
        hosts, devices = map(bound_workers, (self.exchange.axes, self.inside))
        name = f"hierarchical {self.exchange.name}"
        check_local(updates, self.axes, name)
        values, treedef = jax.tree.flatten(updates)
        division = self.exchange.divide([x.shape for x in values], hosts * devices)
        layout = division.layout
        error, server = state.worker_error.value, state.server_error.value
        shapes = error.shape, None if server is None else server.shape
        fits = shapes == self._shapes(layout, hosts, 1, 1)
        check_workers(fits, name, hosts * devices, self.axes)

        results: list[Any] = [None] * len(values)
        exact = [values[i].astype(jnp.float32) for i in division.exact]
        for i, x in zip(division.exact, means(exact, self.axes), strict=True):
            results[i] = x.astype(values[i].dtype)
        blocked = (*division.large, *division.small)
        if blocked:
            share = self._share(layout.joined([values[i] for i in blocked]), hosts)
            agree = self._alone if self.is_alone() else self._agreed
            flat, error, server = agree(share, layout, error, server)
            for i, x in zip(blocked, flat, strict=True):
                results[i] = x.reshape(values[i].shape).astype(values[i].dtype)
        return treedef.unflatten(results), self._state(error, server)

    def _share(self, blocks: Array, hosts: int) -> Array:
        """This device's share of its host's mean, `(hosts, served, block_size)`."""
        blocks = blocks.reshape(hosts, -1, self.exchange.block_size)
        total = lax.psum_scatter(blocks, self.inside, scatter_dimension=1, tiled=True)
        return total / bound_workers(self.inside)

    def _agreed(
        self, share: Array, layout: BlockLayout, error: Array, server: Array | None
    ) -> tuple[list[Array], Array, Array | None]:
        """The leaves of a message that all hosts agree on, and the new errors."""
        hosts, served = share.shape[:2]
        counts = layout.counts().reshape(hosts, -1, served)
        device = lax.axis_index(self.inside)
        counts = lax.dynamic_index_in_dim(counts, device, 1).reshape(-1)
        # In float32: errors of cut blocks are corrected before they are rounded.
        own = error.reshape(-1).astype(jnp.float32)
        buffer = Buffer(share.reshape(-1), own, counts=counts)
        message, (new_error,), server = self.exchange.agree(
            [buffer], None, counts, server
        )
        message = message.reshape(hosts, served, -1)
        message = gather(message, self.inside, axis=1, tiled=True)
        message = message.reshape(layout.total_blocks, -1)
        flat = [
            self.exchange.read(message[rows], size, jnp.float32)
            for rows, size in zip(layout.slices, layout.sizes, strict=True)
        ]
        return flat, new_error.reshape(error.shape).astype(error.dtype), server

    def _alone(
        self, share: Array, layout: BlockLayout, error: Array, server: Array | None
    ) -> tuple[list[Array], Array, Array | None]:
        """The leaves of one host's mean plus the residual that a resized state has."""
        share = share + error.reshape(share.shape).astype(jnp.float32)
        if server is not None:
            share = share + server.reshape(share.shape).astype(jnp.float32)
            server = jnp.zeros_like(server)
        share = mean(share, self.exchange.axes)
        blocks = gather(share, self.inside, axis=1, tiled=True)
        flat = layout.parted(blocks.reshape(-1, self.exchange.block_size))
        return flat, jnp.zeros_like(error), server

    def _shapes(
        self, layout: BlockLayout, hosts: int, slices: int, slices_inside: int
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        served, size = layout.served_blocks * slices_inside, self.exchange.block_size
        server = (slices, served, size) if self.exchange.has_server else None
        return (slices, hosts, served, size), server

    def _state(self, worker: Array, server: Array | None) -> HierarchicalState:
        between = self.exchange.axes
        worker_spec = (PartitionSpec(between, None, self.inside),)
        server_spec = (PartitionSpec(between, self.inside),)
        return HierarchicalState(
            WorkerLocal(worker, self.axes, "average", worker_spec),
            WorkerLocal(server, self.axes, "concatenate", server_spec),
        )
