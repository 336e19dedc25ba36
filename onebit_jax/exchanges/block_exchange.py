"""Exchanges of blocks: leaves are laid into blocks, and a message of them is agreed."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import operator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.exchanges.blocks import Division, divide, exact_means
from onebit_jax.exchanges.exchange import Exchange
from onebit_jax.workers.arithmetic import gather
from onebit_jax.workers.axes import (
    bound_workers,
    check_floats,
    check_local,
    check_workers,
    worker_count,
)
from onebit_jax.workers.worker_local import WorkerLocal
from pallas_kernels import running_mean, to_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jax.typing import ArrayLike, DTypeLike
    from jaxtyping import Float, Float32, Int32, UInt32

    from onebit_jax.exchanges.codec import Codec


class ErrorFeedbackState(NamedTuple):
    """The errors of an exchange of blocks.

    Attributes:
      worker_error: for each leaf, `(workers, *shape)`: of each worker's values, the
        part that its messages have not carried yet; zero for leaves exchanged exactly.
      server_error: (workers, blocks served, block_size): of each worker's averages, as
        the server of its share of the blocks, the part not sent back yet; no arrays
        in an exchange without servers.
    """

    worker_error: WorkerLocal
    server_error: WorkerLocal


class Buffer(NamedTuple):
    """Values of consecutive blocks, with their error.

    Attributes:
      value: what is to be sent; with a momentum, the gradient.
      error: the residual of earlier messages.
      momentum: float32, the same on all workers; None for a value as it is.
    """

    value: Float[Array, " size"]
    error: Float[Array, " size"]
    momentum: Float32[Array, " size"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockExchange(Exchange):
    """An exchange of blocks over worker axes; subclasses say how blocks are agreed.

    One worker encodes nothing (`Alone`). Its state has errors of the usual shapes all
    the same. They are zero, unless the state was resized from that of several workers:
    then the next update adds them in full.

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
    """

    name: str
    axes: tuple[str, ...]
    codec: Codec
    error_dtype: Any
    exact_below: int
    exact_1d: bool
    bucket_size: int

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
    def words(self, workers: int) -> int:
        """Words that a block takes in an agreed message."""

    @abc.abstractmethod
    def agree(
        self,
        buffers: Sequence[Buffer],
        decay: Any,
        counts: Int32[Array, " blocks"],
        server_error: Float[Array, "1 served block_size"] | None,
        *,
        padded: bool = False,
    ) -> tuple[UInt32[Array, "blocks words"], list[Array], Array | None]:
        """Exchanges blocks, the same number from every worker.

        Args:
          buffers: the values, from the first block on.
          decay: of the momentum, where the buffers have one.
          counts: values of each block that are not padding; a multiple of the workers.
          server_error: of the blocks served here; None without a server.
          padded: whether the buffers hold the padding of blocks that are cut short;
            otherwise only a buffer's last block is, and its padding is left out.

        Returns:
          A message that is the same on all workers, a row a block; the new errors
          of the buffers; the new server error.
        """

    @abc.abstractmethod
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
          The values.
        """

    def among(self, workers: int) -> BlockExchange:
        """The exchange among so many workers: for one, `Alone`."""
        if workers > 1:
            return self
        shared = dataclasses.fields(BlockExchange)
        return Alone(**{field.name: getattr(self, field.name) for field in shared})

    def divide(self, shapes: Sequence[tuple[int, ...]], workers: int) -> Division:
        """Divides leaves by this exchange's rule, for so many workers."""
        return divide(
            shapes,
            block_size=self.block_size,
            exact_below=self.exact_below,
            exact_1d=self.exact_1d,
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
        shapes = [p.shape for p in jax.tree.leaves(params)]
        served = self.divide(shapes, workers).layout.served_blocks
        worker = jax.tree.map(
            lambda p: jnp.zeros((slices, *p.shape), self.error_dtype), params
        )
        server = None
        if self.has_server:
            server = jnp.zeros((slices, served, self.block_size), self.error_dtype)
        return self._state(worker, server)

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

    def _state(self, worker: Any, server: Array | None) -> ErrorFeedbackState:
        return ErrorFeedbackState(
            WorkerLocal(worker, self.axes, "average"),
            WorkerLocal(server, self.axes, "concatenate"),
        )

    def _exchange(
        self, updates: optax.Updates, momentum: Any, decay: Any, state: Any
    ) -> tuple[optax.Updates, ErrorFeedbackState]:
        workers = bound_workers(self.axes)
        check_local(updates, self.axes, self.name)
        values, treedef = jax.tree.flatten(updates)
        momenta = treedef.flatten_up_to(momentum)
        errors = treedef.flatten_up_to(state.worker_error.value)
        server = state.server_error.value
        division = self.divide([x.shape for x in values], workers)
        layout = division.layout
        shape = (1, layout.served_blocks, self.block_size)
        fits = [e.shape == (1, *x.shape) for x, e in zip(values, errors, strict=True)]
        fits.append(server is None or server.shape == shape)
        check_workers(all(fits), self.name, workers, self.axes)

        dtypes = [
            x.dtype if m is None else m.dtype
            for x, m in zip(values, momenta, strict=True)
        ]
        results: list[Any] = [None] * len(values)
        means = exact_means(
            [running_mean(values[i], momenta[i], decay) for i in division.exact],
            [dtypes[i] for i in division.exact],
            self.axes,
        )
        for i, mean in zip(division.exact, means, strict=True):
            results[i] = mean
        if division.compressed:
            flat = jax.tree.map(lambda x: x.reshape(-1), (values, errors, momenta))
            buffers = [Buffer(*(x[i] for x in flat)) for i in division.compressed]
            among = self.among(workers)
            message, new_errors, server = among.agree(
                buffers, decay, layout.counts(), server
            )
            for i, rows, error, buffer in zip(
                division.compressed, layout.slices, new_errors, buffers, strict=True
            ):
                errors[i] = error.reshape(errors[i].shape)
                size, into = buffer.value.size, buffer.momentum
                mean = among.read(message[rows], size, dtypes[i], into)
                results[i] = mean.reshape(values[i].shape)
        return treedef.unflatten(results), self._state(
            treedef.unflatten(errors), server
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone(BlockExchange):
    """The exchange of one worker: its values plus the residual, not encoded.

    There is a residual after a state of several workers was resized; the first update
    adds all of it, and leaves none.
    """

    has_server = False  # Server errors of a resized state are added with its own.

    def words(self, workers: int) -> int:
        """A word a value."""
        del workers
        return self.block_size

    def agree(
        self,
        buffers: Sequence[Buffer],
        decay: Any,
        counts: Int32[Array, " blocks"],
        server_error: Float[Array, "1 served block_size"] | None,
        *,
        padded: bool = False,
    ) -> tuple[UInt32[Array, "blocks words"], list[Array], Array | None]:
        """The values plus all errors, not encoded; errors of zero."""
        del padded  # New errors are zero everywhere.
        flat = [
            running_mean(x.value, x.momentum, decay) + x.error.astype(jnp.float32)
            for x in buffers
        ]
        blocks = jnp.concatenate([to_blocks(x, self.block_size)[0] for x in flat])
        blocks = jnp.pad(blocks, ((0, counts.size - blocks.shape[0]), (0, 0)))
        if server_error is not None:
            blocks = blocks + server_error[0].astype(jnp.float32)
            server_error = jnp.zeros_like(server_error)
        words = lax.bitcast_convert_type(blocks, jnp.uint32)
        message = gather(words, self.axes, tiled=True)
        return message, [jnp.zeros_like(x.error) for x in buffers], server_error

    def read(
        self,
        message: UInt32[Array, "b words"],
        size: int,
        dtype: DTypeLike,
        into: Float32[Array, " size"] | None = None,
    ) -> Float[Array, " size"]:
        """The values that the words are."""
        del into
        values = lax.bitcast_convert_type(message, jnp.float32)
        return values.reshape(-1)[:size].astype(dtype)
