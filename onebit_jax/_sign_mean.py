"""The error-compensated 1-bit exchange, in two phases."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp
from jax import lax

from onebit_jax import _axes
from onebit_jax._compressed import compressed_mean
from onebit_jax._wire import Part, Wire
from pallas_kernels import average_and_recompress, decompress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Float32, Int32, UInt32

    from onebit_jax._exchange import Exchange
    from pallas_kernels import Implementation


def sign_mean(
    axis: _axes.AxisNames,
    *,
    block_size: int = 1024,
    scale: Literal["rms", "mean_abs"] = "mean_abs",
    error_dtype: DTypeLike = jnp.float32,
    exact_below: int | None = None,
    bucket_size: int = 2**27,
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

    with :math:`C[x] = s_b\,\mathrm{sign}(x)` and :math:`s_b` the mean magnitude of the
    block, the scale of the smallest error: :math:`\|x - C[x]\|^2 = \|x\|^2 -
    \|x\|_1^2 / |b|`, less than :math:`\|x\|^2` whatever x is. The sum over steps of
    what is returned differs from the sum of the exact means by no more than the errors
    held now. On the wire: for each bucket one all-to-all (between two workers an
    all-gather) and one all-gather of (1 + 32 / block_size) bits a value.

    A value that is not finite, on any worker, makes its block not finite on all.

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.
      block_size: values a scale; a power of two of at least 32.
      scale: 'mean_abs' for the mean magnitude, or 'rms' for the root mean square, whose
        error can be larger than what it compresses.
      error_dtype: dtype of the stored errors. bfloat16 halves their memory and
        loses what rounding drops.
      exact_below: leaves of fewer values are averaged exactly, all in one all-reduce.
        None for block_size / 32 + 2: leaves for which that sends no more bytes.
      bucket_size: the most values that one pair of collectives exchanges. Those of
        one bucket can overlap with the computation of another.
      implementation: what compresses: 'xla', 'mosaic' (kernels for NVIDIA GPUs from
        Hopper on) or 'mosaic_interpreted' (the same, slow, on a CPU); None for 'xla'.

    Returns:
      An exchange. Its state is a `SignMeanState`; `update` computes in float32 and
      returns the dtype that it is given.

    Raises:
      ValueError: if an argument is not one of these, or, from `update`, if the
        implementation cannot run there.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = optax.chain(sign_mean('data', exact_below=0), optax.sgd(1.0))
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
    return compressed_mean(
        _TwoPhases.of(
            "sign_mean",
            axis,
            block_size=block_size,
            scale=scale,
            error_dtype=error_dtype,
            exact_below=exact_below,
            bucket_size=bucket_size,
            implementation=implementation,
        )
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TwoPhases(Wire):
    """All-to-all to the servers, all-gather from them."""

    @property
    def has_server(self) -> bool:
        return True

    def exchange(
        self,
        parts: Sequence[Part],
        decay: Any,
        counts: Int32[Array, " blocks"],
        server_error: Float[Array, "1 served block_size"] | None,
    ) -> tuple[UInt32[Array, "blocks w"], list[Array], Array | None]:
        assert server_error is not None, "a server owes what it has not sent back"
        sent, new_errors = [], []
        for part in parts:
            words, scales, new_error = self.compress(part, decay)
            sent.append(_message(words, scales))
            new_errors.append(new_error)
        served = server_error.shape[1]
        message = jnp.concatenate(sent)
        message = jnp.pad(message, ((0, counts.size - message.shape[0]), (0, 0)))
        message = message.reshape(-1, served, message.shape[1])
        counts = lax.dynamic_slice_in_dim(
            counts, _axes.worker_index(self.axes) * served, served
        )
        agreed, owed = [], []
        # A bucket is a part of what each worker serves.
        for rows in self.buckets(served, message.shape[0] * self.block_size):
            received = _to_servers(message[:, rows], self.axes)
            words, scales, error = average_and_recompress(
                *_parts(received),
                server_error[0, rows].reshape(-1),
                counts[rows],
                scale=self.scale,
                implementation=self.implementation,
            )
            owed.append(error.reshape(-1, self.block_size))
            agreed.append(
                lax.all_gather(_message(words, scales), self.axes, to="invarying")
            )
        whole = jnp.concatenate(agreed, axis=1).reshape(-1, message.shape[2])
        return whole, new_errors, jnp.concatenate(owed)[None]

    def values(
        self,
        message: UInt32[Array, "b w"],
        size: int,
        dtype: DTypeLike,
        into: Float32[Array, " size"] | None,
    ) -> Float[Array, " size"]:
        # By XLA, which fuses it with what the optimizer does next.
        return decompress(*_parts(message), size, dtype, into=into)


def _to_servers(
    message: UInt32[Array, "n served w"], axes: tuple[str, ...]
) -> UInt32[Array, "n served w"]:
    """Gives each worker what all have for it, in any order."""
    if message.shape[0] != 2:
        return lax.all_to_all(message, axes, 0, 0)
    # Two workers swap halves. Gloo's all-to-all asks for the other's half behind its
    # own, so that on a slow link one is sent after the other; its all-gather does not.
    own = _axes.worker_index(axes)
    given = lax.all_gather(
        lax.dynamic_index_in_dim(message, 1 - own, keepdims=False), axes
    )
    kept = lax.dynamic_index_in_dim(message, own, keepdims=False)
    return jnp.stack([kept, lax.dynamic_index_in_dim(given, 1 - own, keepdims=False)])


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
