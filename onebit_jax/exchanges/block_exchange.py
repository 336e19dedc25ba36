"""Exchanges of blocks: leaves are laid into blocks, and a message of them is agreed."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
import operator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.exchanges.blocks import Division, divide
from onebit_jax.exchanges.exchange import Exchange
from onebit_jax.workers.arithmetic import SMALL, hidden, mean, means
from onebit_jax.workers.axes import (
    bound_workers,
    check_floats,
    check_local,
    check_workers,
    worker_count,
)
from onebit_jax.workers.worker_local import WorkerLocal
from pallas_kernels import running_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jax.typing import ArrayLike, DTypeLike
    from jaxtyping import Float, Float32, Int32, UInt32

    from onebit_jax.exchanges.codec import Codec


class ErrorFeedbackState(NamedTuple):
    """The errors of an exchange of blocks.

    Attributes:
      worker_error: for each large leaf, `(workers, *shape)`: of each worker's values,
        the part that its messages have not carried yet; None for other leaves.
      small_error: (workers, blocks, block_size): the same of all small leaves, each
        beginning a block; one block where there are none.
      server_error: (workers, blocks served, block_size): of each worker's averages, as
        the server of its share of the blocks, the part not sent back yet; no array
        in an exchange without servers.
    """

    worker_error: WorkerLocal
    small_error: WorkerLocal
    server_error: WorkerLocal


class Buffer(NamedTuple):
    """Values of consecutive blocks, with their error.

    Attributes:
      value: what is to be sent; with a momentum, the gradient.
      error: the residual of earlier messages.
      momentum: float32, the same on all workers; None for a value as it is.
      counts: of a buffer of whole blocks, the values of each that are not padding; None
        for a buffer without padding, of which only the last block may be cut short.
    """

    value: Float[Array, " size"]
    error: Float[Array, " size"]
    momentum: Float32[Array, " size"] | None = None
    counts: Int32[Array, " blocks"] | None = None

    @property
    def dtype(self) -> Any:
        """That of the mean of such buffers."""
        return (self.value if self.momentum is None else self.momentum).dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockExchange(Exchange):
    """An exchange of blocks over worker axes; subclasses say how blocks are agreed.

    One worker encodes nothing. Its state has errors of the usual shapes all the same.
    They are zero, unless the state was resized from that of several workers: then the
    next update adds them in full.

    Attributes:
      name: the exchange's name, for error messages.
      axes: the worker axes.
      codec: encodes a worker's own blocks.
      has_server: True where workers serve blocks, and have errors as servers.
      error_dtype: dtype of stored errors, float32 or bfloat16.
      exact_below: leaves of fewer values are averaged exactly, all in one all-reduce.
        The rule does not depend on the number of workers, so that a state that is
        resized has the same leaves exact.
      exact_1d: whether leaves of fewer than two dimensions are too.
      bucket_size: the most values that one collective exchanges, where it is not a
        single block of each worker's.
      small_below: leaves of fewer values are encoded together.
    """

    name: str
    axes: tuple[str, ...]
    codec: Codec
    error_dtype: Any
    exact_below: int
    exact_1d: bool
    bucket_size: int
    small_below: int = SMALL

    has_server: ClassVar[bool]

    def __post_init__(self) -> None:
        dtype = jnp.dtype(self.error_dtype)
        if dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"error_dtype must be float32 or bfloat16, got {dtype}.")
        if operator.index(self.bucket_size) < 1:
            raise ValueError(f"bucket_size must be positive, got {self.bucket_size}.")
        object.__setattr__(self, "error_dtype", dtype)
        object.__setattr__(self, "exact_below", operator.index(self.exact_below))

    @property
    def block_size(self) -> int:
        """The number of values in a block."""
        return self.codec.block_size

    @abc.abstractmethod
    def agree(
        self,
        buffers: Sequence[Buffer],
        decay: Any,
        counts: Int32[Array, " blocks"],
        server_error: Float[Array, "1 served block_size"] | None,
    ) -> tuple[UInt32[Array, "blocks words"], list[Array], Array | None]:
        """Exchanges blocks, the same number from each of several workers.

        Args:
          buffers: the values, from the first block on.
          decay: of the momentum, where the buffers have one.
          counts: values of each block that are not padding; a multiple of the workers.
          server_error: of the blocks served here; None without a server.

        Returns:
          A message that is the same on all workers, a row a block; the new errors
          of the buffers; the new server error.
        """

    def read(
        self,
        message: UInt32[Array, "b words"],
        size: int,
        dtype: DTypeLike,
        into: Float32[Array, " size"] | None = None,
    ) -> Float[Array, " size"]:
        """The mean that rows of an agreed message stand for.

        Args:
          message: the words.
          size: values without padding.
          dtype: of the result.
          into: as of `Codec.decode_flat`.

        Returns:
          The values; here the codec's.
        """
        return self.codec.decode_flat(message, size, dtype, into)

    def is_exact(self, shape: tuple[int, ...]) -> bool:
        """True of leaves of few values, and of one dimension if these are exact."""
        few = math.prod(shape) < max(1, self.exact_below)
        return few or (self.exact_1d and len(shape) < 2)

    def divide(self, shapes: Sequence[tuple[int, ...]], workers: int) -> Division:
        """Divides leaves by this exchange's rule, for so many workers."""
        return divide(
            shapes,
            block_size=self.block_size,
            is_exact=self.is_exact,
            small_below=self.small_below,
            workers=workers,
        )

    def bucket_rows(self, rows: int, values: int) -> list[slice]:
        """Cuts rows, of so many values each, into buckets of about one size."""
        number = -(-rows // max(1, self.bucket_size // values))
        ends = [rows * k // number for k in range(number + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    def init(self, params: optax.Params) -> ErrorFeedbackState:
        """Errors of zero."""
        workers, slices = worker_count(self.axes)
        check_floats(params, self.name)
        leaves, treedef = jax.tree.flatten(params)
        division = self.divide([p.shape for p in leaves], workers)

        def zeros(shape: tuple[int, ...] | None) -> Array | None:
            return None if shape is None else jnp.zeros(shape, self.error_dtype)

        *large, small, server = map(zeros, self._shapes(leaves, division, slices))
        return self._state(treedef.unflatten(large), small, server)

    def _shapes(
        self, leaves: Sequence[Any], division: Division, slices: int
    ) -> list[tuple[int, ...] | None]:
        """The shapes of errors: of each leaf, of all small ones, and of the servers."""
        large = [
            (slices, *x.shape) if i in division.large else None
            for i, x in enumerate(leaves)
        ]
        small = (slices, division.small_layout.total_blocks, self.block_size)
        server = (slices, division.layout.served_blocks, self.block_size)
        return [*large, small, server if self.has_server else None]

    def update(
        self,
        updates: optax.Updates,
        state: ErrorFeedbackState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, ErrorFeedbackState]:
        """The agreed mean, in float32 arithmetic and the dtypes of the updates."""
        del params
        nothing = jax.tree.map(lambda _: None, updates)
        return self._exchange(updates, nothing, None, state)

    def exchange_momentum(
        self,
        gradients: optax.Updates,
        momentum: optax.Params,
        decay: ArrayLike,
        state: ErrorFeedbackState,
    ) -> tuple[optax.Updates, ErrorFeedbackState]:
        """The momentum's sum made in the pass that encodes it."""
        return self._exchange(gradients, momentum, decay, state)

    def _state(self, large: Any, small: Any, server: Any) -> ErrorFeedbackState:
        return ErrorFeedbackState(
            WorkerLocal(large, self.axes, "average"),
            WorkerLocal(small, self.axes, "average"),
            WorkerLocal(server, self.axes, "concatenate"),
        )

    def _exchange(
        self, updates: optax.Updates, momentum: Any, decay: Any, state: Any
    ) -> tuple[optax.Updates, ErrorFeedbackState]:
        workers = bound_workers(self.axes)
        check_local(updates, self.axes, self.name)
        values, treedef = jax.tree.flatten(updates)
        momenta = treedef.flatten_up_to(momentum)
        errors: list[Any] = treedef.flatten_up_to(state.worker_error.value)
        small, server = state.small_error.value, state.server_error.value
        division = self.divide([x.shape for x in values], workers)
        given = [None if x is None else x.shape for x in (*errors, small, server)]
        fits = given == self._shapes(values, division, slices=1)
        check_workers(fits, self.name, workers, self.axes)
        dtypes = [
            x.dtype if m is None else m.dtype
            for x, m in zip(values, momenta, strict=True)
        ]
        results: list[Any] = [None] * len(values)

        def sum_of(i: int) -> Array:
            return running_mean(values[i], momenta[i], decay)

        exact = means([sum_of(i) for i in division.exact], self.axes)
        for i, x in zip(division.exact, exact, strict=True):
            results[i] = x.astype(dtypes[i])
        if division.large or division.small:
            flat = jax.tree.map(lambda x: x.reshape(-1), (values, errors, momenta))
            buffers = [Buffer(*(x[i] for x in flat)) for i in division.large]
            if division.small:
                layout = division.small_layout
                joined = layout.joined([sum_of(i) for i in division.small]).reshape(-1)
                buffers.append(
                    Buffer(joined, small.reshape(-1), counts=layout.counts())
                )
            agreed, new_errors, server = self._means(buffers, decay, division, server)
            for i, x, error in zip(division.large, agreed, new_errors, strict=False):
                results[i] = x.reshape(values[i].shape)
                errors[i] = error.reshape(errors[i].shape)
            if division.small:
                small = new_errors[-1].reshape(small.shape)
                parts = division.small_layout.parted(
                    # Made once: each leaf would decode the blocks of all.
                    lax.optimization_barrier(agreed[-1]).reshape(-1, self.block_size)
                )
                for i, x in zip(division.small, parts, strict=True):
                    results[i] = x.reshape(values[i].shape).astype(dtypes[i])
        return treedef.unflatten(results), self._state(
            treedef.unflatten(errors), small, server
        )

    def _means(
        self,
        buffers: list[Buffer],
        decay: Any,
        division: Division,
        server: Array | None,
    ) -> tuple[list[Array], list[Array], Array | None]:
        """The means of buffers, their new errors, and the servers'.

        Of one worker: its values plus the residual that a resized state has, no errors.
        """
        blocks = (-(-buffer.value.size // self.block_size) for buffer in buffers)
        places = itertools.pairwise(itertools.accumulate(blocks, initial=0))
        placed = list(zip(buffers, places, strict=True))
        if not self.is_alone():
            counts = division.layout.counts()
            message, errors, server = self.agree(buffers, decay, counts, server)
            rows = hidden([start for _, (start, _) in placed])
            agreed = [
                self.read(
                    lax.dynamic_slice_in_dim(message, row, end - start),
                    buffer.value.size,
                    buffer.dtype,
                    buffer.momentum,
                )
                for (buffer, (start, end)), row in zip(placed, rows, strict=True)
            ]
            return agreed, errors, server
        agreed = []
        for buffer, (start, _) in placed:
            x = running_mean(buffer.value, buffer.momentum, decay)
            x = x + buffer.error.astype(jnp.float32)
            if server is not None:
                own = server.reshape(-1)[start * self.block_size :][: x.size]
                x = x + own.astype(jnp.float32)
            agreed.append(mean(x, self.axes).astype(buffer.dtype))
        nothing = [jnp.zeros_like(buffer.error) for buffer in buffers]
        return agreed, nothing, None if server is None else jnp.zeros_like(server)
