"""The error-compensated 1-bit exchange."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import _axes
from onebit_jax._blocks import layout_of
from onebit_jax._exchange import Exchange
from onebit_jax._per_worker import PerWorker
from pallas_kernels import (
    average_and_recompress,
    check_block_size,
    check_name,
    compress,
    decompress,
)

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float32, UInt32

    from pallas_kernels import Implementation

WHO = "sign_mean"


class SignMeanState(NamedTuple):
    """What the exchange owes.

    Attributes:
      worker_error: for each leaf, (workers, *shape): what each worker has not sent.
      server_error: (workers, blocks served, block_size): what each worker, as the
        server of its share of the blocks, has not sent back.
    """

    worker_error: PerWorker
    server_error: PerWorker


def sign_mean(
    axis: _axes.AxisNames,
    *,
    block_size: int = 1024,
    scale: Literal["rms", "mean_abs"] = "rms",
    error_dtype: DTypeLike = jnp.float32,
    implementation: Implementation | None = None,
) -> Exchange:
    r"""Averages over the workers, sending one sign a value and one scale a block.

    Each worker i compresses its tree plus its error; each serves an equal share
    of the blocks, averages what it is sent, and compresses the average again:

    .. math::
      \hat x^{(i)} &= C[x^{(i)} + \delta^{(i)}], \quad
      \delta^{(i)} \leftarrow x^{(i)} + \delta^{(i)} - \hat x^{(i)} \\
      \bar x &= C[\tfrac1n \textstyle\sum_i \hat x^{(i)} + \bar\delta], \quad
      \bar\delta \leftarrow \tfrac1n \textstyle\sum_i \hat x^{(i)} + \bar\delta
      - \bar x

    with :math:`C[x] = s_b\,\mathrm{sign}(x)` and :math:`s_b` the root mean square
    of the block. The sum over steps of what is returned differs from the sum of
    the exact means by no more than the errors held now. On the wire: one
    all-to-all and one all-gather of (1 + 32 / block_size) bits a value.

    A value that is not finite, on any worker, makes its block not finite on all.

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.
      block_size: values a scale; a power of two of at least 32.
      scale: 'rms', or 'mean_abs' for the mean magnitude.
      error_dtype: dtype of the stored errors. bfloat16 halves their memory and
        loses what rounding drops.
      implementation: what compresses: 'xla', 'mosaic' (kernels for NVIDIA GPUs from
        Hopper on) or 'mosaic_interpreted' (the same, slow, on a CPU); None for 'xla'.

    Returns:
      An exchange. Its state is a `SignMeanState`; `update` computes in float32 and
      returns the dtype that it is given.

    Raises:
      ValueError: if `block_size`, `scale`, `error_dtype` or `implementation` is not
        one of these, or, from `update`, if the implementation cannot run there.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = optax.chain(sign_mean('data'), optax.sgd(1.0))
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=P('data'), out_specs=P())
      ... def f(g):
      ...     return tx.update(g[0], tx.init(g[0]))[0]
      >>> f(jnp.array([[2.0, -2.0, 2.0]]))
      Array([-2.,  2., -2.], dtype=float32)

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888,
      Algorithm 1, with a scale a block instead of a tensor.
    """
    axes = _axes.as_tuple(axis)
    block_size = operator.index(block_size)
    check_block_size(block_size)
    if scale not in ("rms", "mean_abs"):
        raise ValueError(f"scale must be 'rms' or 'mean_abs', got {scale!r}.")
    check_name(implementation)
    error_dtype = jnp.dtype(error_dtype)
    if error_dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"error_dtype must be float32 or bfloat16, got {error_dtype}.")

    def init_fn(params: optax.Params) -> SignMeanState:
        workers, held = _axes.worker_count(axes)
        for path, leaf in jax.tree.leaves_with_path(params):
            _axes.check_float(jax.tree_util.keystr(path), leaf, WHO)
        shapes = [p.shape for p in jax.tree.leaves(params)]
        layout = layout_of(shapes, block_size, workers)
        worker = jax.tree.map(
            lambda p: jnp.zeros((held, *p.shape), error_dtype), params
        )
        server = jnp.zeros((held, layout.served_blocks, block_size), error_dtype)
        return SignMeanState(
            worker_error=PerWorker(worker, axes, "each"),
            server_error=PerWorker(server, axes, "split"),
        )

    def update_fn(
        updates: optax.Updates,
        state: SignMeanState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, SignMeanState]:
        del params, extra_args
        momentum = jax.tree.map(lambda _: None, updates)
        return exchange(updates, momentum, None, state)

    def exchange(
        updates: optax.Updates, momentum: Any, decay: Any, state: SignMeanState
    ) -> tuple[optax.Updates, SignMeanState]:
        workers = _axes.bound_workers(axes)
        _axes.check_local(updates, axes, WHO)
        leaves, treedef = jax.tree.flatten(updates)
        errors = treedef.flatten_up_to(state.worker_error.value)
        momenta = treedef.flatten_up_to(momentum)
        dtypes = [
            x.dtype if own is None else own.dtype
            for x, own in zip(leaves, momenta, strict=True)
        ]
        layout = layout_of([x.shape for x in leaves], block_size, workers)
        server_error = state.server_error.value
        fits = [e.shape == (1, *x.shape) for x, e in zip(leaves, errors, strict=True)]
        fits.append(server_error.shape == (1, layout.served_blocks, block_size))
        _axes.check_workers(all(fits), WHO, workers, axes)
        if not layout.total_blocks:
            # Nothing agreed differs from nothing in type alone.
            leaves = [
                lax.pmean(x, axes).astype(d)
                for x, d in zip(leaves, dtypes, strict=True)
            ]
            return treedef.unflatten(leaves), state

        sent, new_errors = [], []
        for leaf, error, own in zip(leaves, errors, momenta, strict=True):
            words, scales, new = compress(
                leaf.reshape(-1),
                error.reshape(-1),
                block_size=block_size,
                scale=scale,
                momentum=None if own is None else own.reshape(-1),
                decay=decay,
                implementation=implementation,
            )
            sent.append(_message(words, scales))
            new_errors.append(new.reshape(error.shape))
        unused = layout.total_blocks - sum(layout.blocks)
        message = jnp.pad(jnp.concatenate(sent), ((0, unused), (0, 0)))

        message = message.reshape(workers, layout.served_blocks, -1)
        words, scales = _parts(lax.all_to_all(message, axes, 0, 0))
        served = lax.dynamic_slice_in_dim(
            layout.counts(),
            _axes.worker_index(axes) * layout.served_blocks,
            layout.served_blocks,
        )
        words, scales, new_server_error = average_and_recompress(
            words,
            scales,
            server_error.reshape(-1),
            served,
            scale=scale,
            implementation=implementation,
        )
        agreed = lax.all_gather(
            _message(words, scales), axes, tiled=True, to="invarying"
        )

        result = []
        for leaf, part, dtype in zip(leaves, layout.slices, dtypes, strict=True):
            # By XLA, which fuses it with what the optimizer does next.
            values = decompress(*_parts(agreed[part]), leaf.size, dtype)
            result.append(values.reshape(leaf.shape))
        return treedef.unflatten(result), SignMeanState(
            worker_error=PerWorker(treedef.unflatten(new_errors), axes, "each"),
            server_error=PerWorker(
                new_server_error.reshape(server_error.shape), axes, "split"
            ),
        )

    return Exchange(init_fn, update_fn, axes, fused=exchange)


def _message(
    words: UInt32[Array, "b w"], scales: Float32[Array, " b"]
) -> UInt32[Array, "b w+1"]:
    # Scales travel in the words' array: half as many collectives.
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    return jnp.concatenate([words, bits[:, None]], axis=1)


def _parts(
    message: UInt32[Array, "*n b w+1"],
) -> tuple[UInt32[Array, "*n b w"], Float32[Array, "*n b"]]:
    scales = lax.bitcast_convert_type(message[..., -1], jnp.float32)
    return message[..., :-1], scales
