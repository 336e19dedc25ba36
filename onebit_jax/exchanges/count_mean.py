"""A 1-bit exchange with error feedback, in one all-reduce of counts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from onebit_jax.exchanges.block_exchange import BlockExchange, Buffer
from onebit_jax.exchanges.codec import clear_padding
from onebit_jax.exchanges.sign_mean import SignCodec, split_message
from onebit_jax.workers.axes import AxisNames, as_tuple, bound_workers
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

    from onebit_jax.exchanges.exchange import Exchange
    from pallas_kernels import Scale

MAX_WORKERS = 2**16 - 1


def count_mean(
    axis: AxisNames,
    *,
    block_size: int = 1024,
    scale: Scale = "rms",
    error_dtype: DTypeLike = jnp.float32,
    exact_below: int | None = None,
    exact_1d: bool = False,
    bucket_size: int = 2**27,
) -> Exchange:
    r"""Averages over the workers in one all-reduce that counts positive signs.

    All workers' signs of a block have one scale, the geometric mean of their own, so
    that the average is known from how many of them are positive:

    .. math::
      s_b &= \exp_2 \tfrac1n \textstyle\sum_i \log_2 s_b^{(i)}, \quad
      c = \textstyle\sum_i [x^{(i)} + \delta^{(i)} \ge 0] \\
      \delta^{(i)} &\leftarrow x^{(i)} + \delta^{(i)}
      - s_b\,\mathrm{sign}(x^{(i)} + \delta^{(i)}), \quad
      \bar x = s_b \frac{2 c - n}{n}

    with the logarithm linear between powers of two: what is averaged is the bit
    patterns of the float32 scales, without their last :math:`\lceil \log_2 n \rceil`
    bits. Workers whose scale is zero do not count. A count is a digit of base n + 1,
    :math:`\lfloor 32 / \log_2(n+1) \rfloor` of them in a word, so that the words of all
    workers are added without a carry. The sums are exact: there is no server and no
    server error.

    For each bucket one all-reduce of :math:`\log_2(n + 1)` bits a value and more,
    1.6 with 2 workers, 2.5 with 4, 6.4 with 64. A ring sends each of these bits as
    often as `sign_mean`'s one bit a value, so that it sends more. It is for networks
    whose switches add up, or where few messages matter more than few bytes.

    A geometric mean is at most the mean. Where some workers' values are far
    larger than others', their errors are larger than `sign_mean`'s and take more
    steps to be sent.

    A value that is not finite, on any worker, makes its block not finite on all.

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.
      block_size: how many consecutive values share one scale; a power of two from 32 to
        2**24.
      scale: a worker's own: 'rms' for the root mean square, or 'mean_abs' for the mean
        magnitude.
      error_dtype: dtype of the stored errors, float32 or bfloat16.
      exact_below: leaves of fewer values are averaged exactly, all in one all-reduce.
        None for block_size / 32 + 2, as in `sign_mean`.
      exact_1d: whether leaves of fewer than two dimensions are averaged exactly too.
      bucket_size: the most values that one all-reduce sums, but at least a block.

    Returns:
      An exchange. Its state is an `ErrorFeedbackState`; `update` computes in float32
      and returns the dtype that it is given.

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
    codec = SignCodec(block_size, scale)
    return CountMean(
        name="count_mean",
        axes=as_tuple(axis),
        codec=codec,
        error_dtype=error_dtype,
        exact_below=codec.words + 1 if exact_below is None else exact_below,
        exact_1d=exact_1d,
        bucket_size=bucket_size,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountMean(BlockExchange):
    """The exchange of `count_mean`.

    Attributes:
      codec: what a worker's own signs and scales are made by.
    """

    codec: SignCodec

    has_server = False  # Sums are exact.

    def agree(
        self,
        buffers: Sequence[Buffer],
        decay: Any,
        counts: Int32[Array, " blocks"],
        server_error: Float[Array, "1 served block_size"] | None,
    ) -> tuple[UInt32[Array, "blocks words"], list[Array], Array | None]:
        """Adds the counts of all workers; errors are those of the shared scale."""
        workers = bound_workers(self.axes)
        if workers > MAX_WORKERS:
            raise ValueError(
                f"{self.name} counts no more than {MAX_WORKERS} workers, and there are "
                f"{workers}: use sign_mean."
            )
        encoded = [
            self.codec.encode_with_error(
                buffer.value,
                # In float32 until the shared scale is known, and then rounded once.
                buffer.error.astype(jnp.float32),
                momentum=buffer.momentum,
                decay=decay,
                counts=buffer.counts,
            )
            for buffer in buffers
        ]
        signs, scales = split_message(jnp.concatenate([words for words, _ in encoded]))
        bits = unpack_bits(signs).reshape(-1, self.block_size)
        columns = [pack_digits(bits, workers), *_scale_words(scales, workers)]
        rows = jnp.concatenate(columns, axis=1)
        rows = jnp.pad(rows, ((0, counts.size - rows.shape[0]), (0, 0)))
        buckets = self.bucket_rows(counts.size, self.block_size)
        agreed = jnp.concatenate([lax.psum(rows[b], self.axes) for b in buckets])

        shared = _shared_scales(agreed, workers)
        new_errors, first = [], 0
        for buffer, (words, error) in zip(buffers, encoded, strict=True):
            last = first + words.shape[0]
            # The error so far is that of the worker's own scale.
            signs, scales = split_message(words)
            change = unpack_signs(signs, scales - shared[first:last]).reshape(-1)
            error = error + change[: error.size]
            if buffer.counts is not None:
                blocks = error.reshape(-1, self.block_size)
                error = clear_padding(blocks, buffer.counts).reshape(-1)
            new_errors.append(error.astype(self.error_dtype))
            first = last
        return agreed, new_errors, server_error

    def read(
        self,
        message: UInt32[Array, "b words"],
        size: int,
        dtype: DTypeLike,
        into: Float32[Array, " size"] | None = None,
    ) -> Float[Array, " size"]:
        """The shared scale, times the mean of the signs that were counted."""
        del into
        workers = bound_workers(self.axes)
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
    """Bits of the scales, and flags of those that count, as words that can be added."""
    pattern = lax.bitcast_convert_type(scales, jnp.uint32)
    finite = jnp.isfinite(scales)
    counted = finite & (scales > 0)
    short = jnp.where(counted, pattern >> _dropped_bits(workers), jnp.uint32(0))
    # The lower half counts workers with a scale, the upper those not finite.
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
