"""The error-compensated 1-bit exchange, in one all-reduce of counts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp
from jax import lax

from onebit_jax import _axes
from onebit_jax._compressed import compressed_mean
from onebit_jax._wire import Part, Wire
from pallas_kernels import (
    pack_digits,
    unpack_bits,
    unpack_digits,
    unpack_signs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Float32, Int32, UInt32

    from onebit_jax._exchange import Exchange

MAX_WORKERS = 2**16 - 1


def count_mean(
    axis: _axes.AxisNames,
    *,
    block_size: int = 1024,
    scale: Literal["rms", "mean_abs"] = "mean_abs",
    error_dtype: DTypeLike = jnp.float32,
    exact_below: int | None = None,
    bucket_size: int = 2**27,
) -> Exchange:
    r"""Averages over the workers in one all-reduce that counts positive signs.

    All workers' signs of a block have one scale, the mean of their own in the
    logarithm, so that the average is known from how many of them are positive:

    .. math::
      s_b &= \exp_2 \tfrac1n \textstyle\sum_i \log_2 s_b^{(i)}, \quad
      c = \textstyle\sum_i [x^{(i)} + \delta^{(i)} \ge 0] \\
      \delta^{(i)} &\leftarrow x^{(i)} + \delta^{(i)}
      - s_b\,\mathrm{sign}(x^{(i)} + \delta^{(i)}), \quad
      \bar x = s_b \frac{2 c - n}{n}

    with the logarithm linear between powers of two: what is averaged is the bit
    patterns of the float32 scales, without their last :math:`\lceil \log_2 n \rceil`
    bits; workers whose scale is zero do not count. A count is a digit of base n + 1,
    :math:`\lfloor 32 / \log_2(n+1) \rfloor` of them in a word, so that the words of
    all workers are added without a carry. The sums are exact: there is no server and
    no server error.

    For each bucket one all-reduce of :math:`\log_2(n + 1)` bits a value and more,
    1.6 with 2 workers, 2.5 with 4, 6.4 with 64. A ring sends these as often as
    `sign_mean`'s single bits, which are fewer; this is for where an all-reduce is
    what the network does best, inside its switches or with few messages.

    A mean in the logarithm is below the mean. Where some workers' values are far
    larger than others', their errors are larger than `sign_mean`'s and take more
    steps to be sent.

    A value that is not finite, on any worker, makes its block not finite on all.

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.
      block_size: values a scale; a power of two of at least 32.
      scale: a worker's own: 'mean_abs' for the mean magnitude, or 'rms' for the root
        mean square.
      error_dtype: dtype of the stored errors.
      exact_below: leaves of fewer values are averaged exactly, all in one all-reduce.
        None for block_size / 32 + 2, as in `sign_mean`.
      bucket_size: the most values that one all-reduce sums.

    Returns:
      An exchange. Its state is a `SignMeanState`; `update` computes in float32 and
      returns the dtype that it is given.

    Raises:
      ValueError: if an argument is not one of these, or, from `update`, if there are
        more than 65,535 workers.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = optax.chain(count_mean('data', exact_below=0), optax.sgd(1.0))
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=P('data'), out_specs=P())
      ... def f(g):
      ...     return tx.update(g[0], tx.init(g[0]))[0]
      >>> f(jnp.array([[2.0, -2.0, 2.0]]))
      Array([-2.,  2., -2.], dtype=float32)

    References:
      Bernstein et al., signSGD with majority vote, 2019,
      https://arxiv.org/abs/1810.05291, for sums of signs; error feedback as in Tang
      et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888, Algorithm 1.
    """
    return compressed_mean(
        _Counts.of(
            "count_mean",
            axis,
            block_size=block_size,
            scale=scale,
            error_dtype=error_dtype,
            exact_below=exact_below,
            bucket_size=bucket_size,
        )
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counts(Wire):
    """Counts of positive signs, a shared scale a block, one all-reduce."""

    @property
    def has_server(self) -> bool:
        return False

    def exchange(
        self,
        parts: Sequence[Part],
        decay: Any,
        counts: Int32[Array, " blocks"],
        server_error: Float[Array, "1 served block_size"] | None,
    ) -> tuple[UInt32[Array, "blocks w"], list[Array], Array | None]:
        workers = _axes.bound_workers(self.axes)
        if workers > MAX_WORKERS:
            raise ValueError(
                f"{self.who} counts no more than {MAX_WORKERS} workers, and there are "
                f"{workers}: use sign_mean."
            )
        # The errors are not final yet: rounded once, in the end.
        parts = [part._replace(error=part.error.astype(jnp.float32)) for part in parts]
        sent = [self.compress(part, decay) for part in parts]
        words, scales = (jnp.concatenate([s[i] for s in sent]) for i in range(2))
        bits = unpack_bits(words).reshape(-1, self.block_size)
        message = [pack_digits(bits, workers), *_scale_words(scales, workers)]
        rows = jnp.concatenate(message, axis=1)
        rows = jnp.pad(rows, ((0, counts.size - rows.shape[0]), (0, 0)))
        buckets = self.buckets(counts.size, self.block_size)
        agreed = jnp.concatenate([lax.psum(rows[b], self.axes) for b in buckets])

        shared = _shared_scales(agreed, workers)
        new_errors, start = [], 0
        for part, (words, scales, new_error) in zip(parts, sent, strict=True):
            stop = start + scales.size
            # The error so far is beside the worker's own scale.
            change = unpack_signs(words, scales - shared[start:stop]).reshape(-1)
            new_error = new_error + change[: new_error.size]
            if part.tails is not None:
                new_error = part.tails.clear(new_error, self.block_size)
            new_errors.append(new_error.astype(self.error_dtype))
            start = stop
        return agreed, new_errors, server_error

    def values(
        self,
        message: UInt32[Array, "b w"],
        size: int,
        dtype: DTypeLike,
        into: Float32[Array, " size"] | None,
    ) -> Float[Array, " size"]:
        del into
        workers = _axes.bound_workers(self.axes)
        positive = unpack_digits(message[:, :-2], workers, self.block_size)
        scales = _shared_scales(message, workers)
        mean = (scales / workers)[:, None] * (2 * positive - workers)
        return mean.reshape(-1)[:size].astype(dtype)


def _dropped_bits(workers: int) -> int:
    # So that the sum of as many patterns, of 31 bits each, is a word.
    return (workers - 1).bit_length()


def _scale_words(
    scales: Float32[Array, " b"], workers: int
) -> tuple[UInt32[Array, "b 1"], UInt32[Array, "b 1"]]:
    """A scale's pattern, and whether it is one, in words that can be added."""
    pattern = lax.bitcast_convert_type(scales, jnp.uint32)
    finite = jnp.isfinite(scales)
    counted = finite & (scales > 0)
    short = jnp.where(counted, pattern >> _dropped_bits(workers), jnp.uint32(0))
    # Workers that count in the lower half, workers with a bad value in the upper.
    flags = counted.astype(jnp.uint32) + (~finite).astype(jnp.uint32) * 2**16
    return short[:, None], flags[:, None]


def _shared_scales(agreed: UInt32[Array, "b w"], workers: int) -> Float32[Array, " b"]:
    total, flags = agreed[:, -2], agreed[:, -1]
    counted = jnp.maximum(flags & jnp.uint32(2**16 - 1), jnp.uint32(1))
    dropped = _dropped_bits(workers)
    whole = total // counted
    rest = ((total - whole * counted) << dropped) // counted
    scales = lax.bitcast_convert_type((whole << dropped) + rest, jnp.float32)
    return jnp.where(flags >> 16 > 0, jnp.float32(jnp.nan), scales)
