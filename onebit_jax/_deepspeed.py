"""The 1-bit exchange as DeepSpeed lays it out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import _axes
from onebit_jax._exchange import Exchange
from onebit_jax._per_worker import PerWorker
from onebit_jax._wire import sign_delay

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32, UInt8

WHO = "deepspeed_sign_mean"


class DeepSpeedSignMeanState(NamedTuple):
    """What the exchange owes, in DeepSpeed's buffers.

    Attributes:
      worker_error: for each leaf, (workers, padded size).
      server_error: for each leaf, (workers, padded size / workers).
    """

    worker_error: PerWorker
    server_error: PerWorker


def deepspeed_sign_mean(axis: _axes.AxisNames) -> Exchange:
    r"""Averages over the workers by signs, with DeepSpeed 0.19.6's layout.

    Like `sign_mean`, but every leaf is exchanged on its own: flattened, padded
    with zeros to N, a multiple of n · lcm(n, 8); one scale
    :math:`\|x\|_2 / \sqrt N` a worker and leaf, and one such scale for the chunk
    of N / n values that each worker serves. Padding enters the norms and is sent,
    and its errors are kept. One worker compresses nothing. For reproducing
    DeepSpeed's numbers; `sign_mean` has the smaller error and fewer collectives.

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.

    Returns:
      An exchange. Its state is a `DeepSpeedSignMeanState`.

    Example:
      >>> import onebit_jax
      >>> tx = onebit_jax.onebit_adam(
      ...     1e-3,
      ...     deepspeed_sign_mean('data'),
      ...     onebit_jax.freeze_at(1000),
      ...     bias_correction=False,
      ...     as_published=True,
      ... )

    References:
      DeepSpeed 0.19.6, `runtime/comm/nccl.py` and `compressed.py`.
    """
    axes = _axes.as_tuple(axis)

    def init_fn(params: optax.Params) -> DeepSpeedSignMeanState:
        workers, held = _axes.worker_count(axes)
        for path, leaf in jax.tree.leaves_with_path(params):
            _axes.check_float(jax.tree_util.keystr(path), leaf, WHO)

        def errors(parts: int) -> optax.Params:
            def zeros(p: Array) -> Array:
                return jnp.zeros((held, padded_size(p.size, workers) // parts))

            return jax.tree.map(zeros, params)

        return DeepSpeedSignMeanState(
            worker_error=PerWorker(errors(1), axes, "each"),
            server_error=PerWorker(errors(workers), axes, "split"),
        )

    def update_fn(
        updates: optax.Updates,
        state: DeepSpeedSignMeanState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, DeepSpeedSignMeanState]:
        del params, extra_args
        workers = _axes.bound_workers(axes)
        _axes.check_local(updates, axes, WHO)
        if workers == 1:  # DeepSpeed does not compress what it need not send
            return jax.tree.map(lambda x: lax.pmean(x, axes), updates), state
        leaves, treedef = jax.tree.flatten(updates)
        results = []
        for leaf, worker_error, server_error in zip(
            leaves,
            treedef.flatten_up_to(state.worker_error.value),
            treedef.flatten_up_to(state.server_error.value),
            strict=True,
        ):
            expected = padded_size(leaf.size, workers)
            fits = worker_error.shape == (1, expected)
            _axes.check_workers(fits, WHO, workers, axes)
            results.append(_exchange_leaf(leaf, worker_error, server_error, axes))
        means, worker_errors, server_errors = (
            treedef.unflatten([result[i] for result in results]) for i in range(3)
        )
        return means, DeepSpeedSignMeanState(
            worker_error=PerWorker(worker_errors, axes, "each"),
            server_error=PerWorker(server_errors, axes, "split"),
        )

    return Exchange(init_fn, update_fn, axes, delay=2 * sign_delay("rms"))


def padded_size(size: int, workers: int) -> int:
    """The size that DeepSpeed pads a leaf to."""
    quantum = workers * math.lcm(workers, 8)
    return -(-size // quantum) * quantum


def _exchange_leaf(
    leaf: Array,
    worker_error: Float32[Array, "1 padded"],
    server_error: Float32[Array, "1 served"],
    axes: tuple[str, ...],
) -> tuple[Array, Float32[Array, "1 padded"], Float32[Array, "1 served"]]:
    if not leaf.size:
        # Nothing agreed differs from nothing in type alone.
        return lax.pmean(leaf, axes), worker_error, server_error
    served = server_error.size
    flat = leaf.reshape(-1).astype(jnp.float32)
    x = jnp.pad(flat, (0, worker_error.size - flat.size)) + worker_error[0]
    scale, signs, error = _compress(x)

    signs = lax.all_to_all(signs.reshape(-1, served // 8), axes, 0, 0)
    scales = lax.all_gather(scale, axes)
    y = jnp.mean(_decompress(scales[:, None], signs), axis=0) + server_error[0]
    new_scale, new_signs, new_error = _compress(y)

    signs = lax.all_gather(new_signs, axes, to="invarying")
    scales = lax.all_gather(new_scale, axes, to="invarying")
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
