"""An exchange of a whole tree, of a wire format."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import _axes
from onebit_jax._blocks import BlockLayout, layout_of
from onebit_jax._exact_leaves import exact_means
from onebit_jax._exchange import Exchange
from onebit_jax._per_worker import PerWorker
from onebit_jax._wire import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jax.typing import DTypeLike

    from onebit_jax._wire import Wire


class SignMeanState(NamedTuple):
    """What an exchange owes.

    Attributes:
      worker_error: for each leaf, (workers, *shape): what each worker has not sent,
        zero for leaves that go exactly.
      server_error: (workers, blocks served, block_size): what each worker, as the
        server of its share of the blocks, has not sent back; None where the wire
        format has no server.
    """

    worker_error: PerWorker
    server_error: Any


class Leaves(NamedTuple):
    """A tree's leaves on their way through an exchange.

    Attributes:
      values: each worker's own, or its gradients.
      momenta: what gradients are added to; None for values as they are.
      decay: of the momenta.
      dtypes: of the results.
      exact: places of the leaves that are averaged exactly.
      compressed: places of the others.
      layout: where the others' blocks are.
    """

    values: list[Array]
    momenta: list[Any]
    decay: Any
    dtypes: list[DTypeLike]
    exact: tuple[int, ...]
    compressed: tuple[int, ...]
    layout: BlockLayout

    @classmethod
    def of(
        cls, values: list[Array], momenta: list[Any], decay: Any, wire: Wire, parts: int
    ) -> Leaves:
        """Divides leaves by the wire's rule, their blocks in so many equal parts."""
        dtypes = [
            x.dtype if own is None else own.dtype
            for x, own in zip(values, momenta, strict=True)
        ]
        exact, compressed, layout = divide([x.shape for x in values], wire, parts)
        return cls(values, momenta, decay, dtypes, exact, compressed, layout)

    def exact_results(self, axes: tuple[str, ...]) -> list[Any]:
        """The results, of the leaves that are averaged exactly."""
        results: list[Any] = [None] * len(self.values)
        means = exact_means(
            [self.values[i] for i in self.exact],
            [self.momenta[i] for i in self.exact],
            self.decay,
            [self.dtypes[i] for i in self.exact],
            axes,
        )
        for i, mean in zip(self.exact, means, strict=True):
            results[i] = mean
        return results

    def result(self, i: int, wire: Wire, message: Array) -> Array:
        """The result of a compressed leaf, from its rows of an agreed message."""
        value, own = self.values[i], self.momenta[i]
        into = None if own is None else own.reshape(-1)
        mean = wire.values(message, value.size, self.dtypes[i], into)
        return mean.reshape(value.shape)


def divide(
    shapes: Sequence[tuple[int, ...]], wire: Wire, parts: int
) -> tuple[tuple[int, ...], tuple[int, ...], BlockLayout]:
    """The places of leaves that go exactly, those of the others, and their layout."""
    # Nothing at all needs no blocks.
    least = max(1, wire.exact_below)
    exact = tuple(i for i, s in enumerate(shapes) if math.prod(s) < least)
    compressed = tuple(i for i in range(len(shapes)) if i not in exact)
    layout = layout_of([shapes[i] for i in compressed], wire.block_size, parts)
    return exact, compressed, layout


def check_floats(params: Any, wire: Wire) -> None:
    """Refuses parameters of a dtype that cannot be exchanged."""
    for path, leaf in jax.tree.leaves_with_path(params):
        _axes.check_float(jax.tree_util.keystr(path), leaf, wire.who)


def compressed_mean(wire: Wire) -> Exchange:
    """The exchange over a wire's axes, all of them one team of workers.

    Args:
      wire: the wire format.

    Returns:
      An exchange. Its state is a `SignMeanState`; `update` computes in float32 and
      returns the dtype that it is given.
    """
    axes = wire.axes

    def init_fn(params: optax.Params) -> SignMeanState:
        workers, held = _axes.worker_count(axes)
        check_floats(params, wire)
        shapes = [p.shape for p in jax.tree.leaves(params)]
        _, _, layout = divide(shapes, wire, workers)
        worker = jax.tree.map(
            lambda p: jnp.zeros((held, *p.shape), wire.error_dtype), params
        )
        shape = (held, layout.served_blocks, wire.block_size)
        server = jnp.zeros(shape, wire.error_dtype) if wire.has_server else None
        return SignMeanState(
            worker_error=PerWorker(worker, axes, "each"),
            server_error=PerWorker(server, axes, "split"),
        )

    def exchange(
        updates: optax.Updates, momentum: Any, decay: Any, state: SignMeanState
    ) -> tuple[optax.Updates, SignMeanState]:
        workers = _axes.bound_workers(axes)
        _axes.check_local(updates, axes, wire.who)
        values, treedef = jax.tree.flatten(updates)
        momenta = treedef.flatten_up_to(momentum)
        errors = treedef.flatten_up_to(state.worker_error.value)
        server_error = state.server_error.value
        leaves = Leaves.of(values, momenta, decay, wire, workers)
        layout = leaves.layout
        fits = [e.shape == (1, *x.shape) for x, e in zip(values, errors, strict=True)]
        if wire.has_server:
            shape = (1, layout.served_blocks, wire.block_size)
            fits.append(server_error.shape == shape)
        _axes.check_workers(all(fits), wire.who, workers, axes)

        results = leaves.exact_results(axes)
        if leaves.compressed:
            parts = [
                Part(
                    values[i].reshape(-1),
                    errors[i].reshape(-1),
                    None if momenta[i] is None else momenta[i].reshape(-1),
                )
                for i in leaves.compressed
            ]
            message, new_errors, server_error = wire.exchange(
                parts, decay, layout.counts(), server_error
            )
            for i, rows, error in zip(
                leaves.compressed, layout.slices, new_errors, strict=True
            ):
                errors[i] = error.reshape(errors[i].shape)
                results[i] = leaves.result(i, wire, message[rows])
        return treedef.unflatten(results), SignMeanState(
            worker_error=PerWorker(treedef.unflatten(errors), axes, "each"),
            server_error=PerWorker(server_error, axes, "split"),
        )

    return Exchange.of_momentum(init_fn, exchange, axes, wire, wire.delay)
