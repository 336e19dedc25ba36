"""The 1-bit exchange as DeepSpeed lays it out."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from onebit_jax.exchanges.exchange import Exchange
from onebit_jax.workers.arithmetic import gather
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
    from jaxtyping import Float32, UInt8

_NAME = "deepspeed_sign_mean"


class DeepSpeedSignMeanState(NamedTuple):
    """The errors of the exchange, in DeepSpeed's buffers.

    Attributes:
      worker_error: for each leaf, or once where leaves are fused,
        (workers, padded size).
      server_error: likewise, (workers, padded size / workers).
    """

    worker_error: WorkerLocal
    server_error: WorkerLocal


def deepspeed_sign_mean(axis: AxisNames, *, fused: bool = False) -> Exchange:
    r"""Averages over the workers by signs, with DeepSpeed 0.19.6's layout.

    Like `sign_mean`, but every leaf is exchanged on its own: flattened, padded
    with zeros to N, a multiple of n · lcm(n, 8); one scale
    :math:`\|x\|_2 / \sqrt N` a worker and leaf, and one such scale for the chunk
    of N / n values that each worker serves. Padding enters the norms and is sent,
    and its errors are kept. One worker compresses nothing. For reproducing
    DeepSpeed's numbers; `sign_mean` has the smaller error and fewer collectives.

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.
      fused: whether all leaves are exchanged as one, one after another in the order
        of the tree, as DeepSpeed's 1-bit LAMB does: one scale a worker, one a chunk.

    Returns:
      An exchange. Its state is a `DeepSpeedSignMeanState`.

    Raises:
      TypeError: from `init` and `update`, for leaves that are not real floating-point.
      ValueError: from `update`, if an axis is not bound, leaves are averaged already,
        or the state is one of another number of workers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> exchange = deepspeed_sign_mean('data')
      >>> def mean(g):
      ...     return exchange.update(g, exchange.init(g))[0]
      >>> own = jnp.array([[-4.0, 0.0], [-4.0, 0.0]])  # padded to N = 16
      >>> print(jax.vmap(mean, axis_name='data')(own)[0].round(3))
      [-1.  1.]

    References:
      DeepSpeed 0.19.6, `runtime/comm/nccl.py` and `compressed.py`; `fused` as in
      `runtime/fp16/onebit/lamb.py`.
    """
    return DeepSpeedSignMean(as_tuple(axis), fused)


@dataclasses.dataclass(frozen=True)
class DeepSpeedSignMean(Exchange):
    """The exchange of `deepspeed_sign_mean`."""

    axes: tuple[str, ...]
    fused: bool = False

    def is_alone(self) -> bool:
        """False: DeepSpeed freezes the variance of one worker, too."""
        return False

    def init(self, params: optax.Params) -> DeepSpeedSignMeanState:
        """Errors of zero."""
        workers, slices = worker_count(self.axes)
        check_floats(params, _NAME)

        def errors(parts: int) -> optax.Params:
            def zeros(size: int) -> Array:
                shape = slices, padded_size(size, workers) // parts
                return jnp.zeros(shape, jnp.float32)

            return jax.tree.map(zeros, self._sizes(params))

        return DeepSpeedSignMeanState(
            worker_error=WorkerLocal(errors(1), self.axes, "average"),
            server_error=WorkerLocal(errors(workers), self.axes, "concatenate"),
        )

    def update(
        self,
        updates: optax.Updates,
        state: DeepSpeedSignMeanState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, DeepSpeedSignMeanState]:
        """Each leaf by itself, or all as one."""
        del params
        bound_workers(self.axes)
        check_local(updates, self.axes, _NAME)
        if not self.fused:
            return self._exchange(updates, state)
        flat, unravel = ravel_pytree(optax.tree.cast(updates, jnp.float32))
        mean, state = self._exchange(flat, state)
        means = jax.tree.map(lambda m, u: m.astype(u.dtype), unravel(mean), updates)
        return means, state

    def _exchange(
        self, updates: optax.Updates, state: DeepSpeedSignMeanState
    ) -> tuple[Any, DeepSpeedSignMeanState]:
        axes = self.axes
        workers = bound_workers(axes)
        leaves, treedef = jax.tree.flatten(updates)
        results = []
        for leaf, worker_error, server_error in zip(
            leaves,
            treedef.flatten_up_to(state.worker_error.value),
            treedef.flatten_up_to(state.server_error.value),
            strict=True,
        ):
            fits = worker_error.shape == (1, padded_size(leaf.size, workers))
            check_workers(fits, _NAME, workers, axes)
            # DeepSpeed compresses nothing for one worker.
            exchange = _exchange_leaf if workers > 1 else _add_residual
            results.append(exchange(leaf, worker_error, server_error, axes))
        means, worker_errors, server_errors = (
            treedef.unflatten([result[i] for result in results]) for i in range(3)
        )
        return means, DeepSpeedSignMeanState(
            worker_error=WorkerLocal(worker_errors, axes, "average"),
            server_error=WorkerLocal(server_errors, axes, "concatenate"),
        )

    def _sizes(self, params: Any) -> Any:
        """For each leaf its size; one size for all that are fused."""
        sizes = jax.tree.map(lambda p: p.size, params)
        return sum(jax.tree.leaves(sizes)) if self.fused else sizes


def padded_size(size: int, workers: int) -> int:
    """The size that DeepSpeed pads a leaf to."""
    quantum = workers * math.lcm(workers, 8)
    return -(-size // quantum) * quantum


def _add_residual(
    leaf: Array,
    worker_error: Float32[Array, "1 padded"],
    server_error: Float32[Array, "1 padded"],
    axes: tuple[str, ...],
) -> tuple[Array, Float32[Array, "1 padded"], Float32[Array, "1 padded"]]:
    """A leaf of one worker plus the residual that its state has from several."""
    residual = (worker_error + server_error)[0, : leaf.size].reshape(leaf.shape)
    value = (leaf.astype(jnp.float32) + residual).astype(leaf.dtype)
    zeros = jnp.zeros_like(worker_error), jnp.zeros_like(server_error)
    return lax.pmean(value, axes), *zeros


def _exchange_leaf(
    leaf: Array,
    worker_error: Float32[Array, "1 padded"],
    server_error: Float32[Array, "1 served"],
    axes: tuple[str, ...],
) -> tuple[Array, Float32[Array, "1 padded"], Float32[Array, "1 served"]]:
    if not leaf.size:
        # An empty leaf needs only the type of an agreed value.
        return lax.pmean(leaf, axes), worker_error, server_error
    served = server_error.size
    flat = leaf.reshape(-1).astype(jnp.float32)
    x = jnp.pad(flat, (0, worker_error.size - flat.size)) + worker_error[0]
    scale, signs, error = _compress(x)

    signs = lax.all_to_all(signs.reshape(-1, served // 8), axes, 0, 0)
    scales = lax.all_gather(scale, axes)
    y = jnp.mean(_decompress(scales[:, None], signs), axis=0) + server_error[0]
    new_scale, new_signs, new_error = _compress(y)

    signs = gather(new_signs, axes)
    scales = gather(new_scale, axes)
    mean = _decompress(scales[:, None], signs).reshape(-1)[: flat.size]
    return mean.reshape(leaf.shape).astype(leaf.dtype), error[None], new_error[None]


def _compress(
    x: Float32[Array, " size"],
) -> tuple[Float32[Array, ""], UInt8[Array, " bytes"], Float32[Array, " size"]]:
    scale = jnp.sqrt(jnp.sum(x * x)) / jnp.sqrt(jnp.float32(x.size))
    return scale, jnp.packbits(x >= 0), x - jnp.where(x >= 0, scale, -scale)


def _decompress(
    scales: Float32[Array, "n 1"], signs: UInt8[Array, "n bytes"]
) -> Float32[Array, "n size"]:
    return jnp.where(jnp.unpackbits(signs, axis=1) == 1, scales, -scales)
