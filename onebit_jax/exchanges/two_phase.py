"""The two-phase topology: all-to-all to servers, all-gather from them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from onebit_jax.exchanges.block_exchange import BlockExchange, Buffer
from onebit_jax.exchanges.codec import Codec, check_codec
from onebit_jax.workers.arithmetic import gather
from onebit_jax.workers.axes import AxisNames, as_tuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Int32, UInt32


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoPhase(BlockExchange):
    """The exchange of `two_phase`, whose codec encodes there and back."""

    has_server = True

    def agree(
        self,
        buffers: Sequence[Buffer],
        decay: Any,
        counts: Int32[Array, " blocks"],
        server_error: Float[Array, "1 served block_size"] | None,
    ) -> tuple[UInt32[Array, "blocks words"], list[Array], Array | None]:
        """Sends each server its blocks, and gathers the averages that they encode."""
        assert server_error is not None, "two phases have servers"
        encoded = [
            self.codec.encode_with_error(
                buffer.value,
                buffer.error,
                momentum=buffer.momentum,
                decay=decay,
                counts=buffer.counts,
            )
            for buffer in buffers
        ]
        served = server_error.shape[1]
        # Made once: for what each of two workers keeps, a GPU's kernel would pack and
        # join all leaves again.
        message = jnp.concatenate(lax.optimization_barrier([w for w, _ in encoded]))
        message = jnp.pad(message, ((0, counts.size - message.shape[0]), (0, 0)))
        message = lax.optimization_barrier(
            message.reshape(-1, served, message.shape[1])
        )
        counts = lax.dynamic_slice_in_dim(
            counts, lax.axis_index(self.axes) * served, served
        )
        agreed, server_errors = [], []
        # A bucket is a part of what each worker serves.
        for rows in self.bucket_rows(served, message.shape[0] * self.block_size):
            words, error = self.codec.average_and_encode(
                _to_servers(message[:, rows], self.axes),
                server_error[0, rows].reshape(-1),
                counts[rows],
            )
            server_errors.append(error.reshape(-1, self.block_size))
            agreed.append(gather(words, self.axes))
        whole = jnp.concatenate(agreed, axis=1).reshape(-1, message.shape[2])
        return whole, [e for _, e in encoded], jnp.concatenate(server_errors)[None]


def two_phase(
    axis: AxisNames,
    codec: Codec,
    *,
    name: str | None = None,
    error_dtype: DTypeLike = jnp.float32,
    exact_below: int | None = None,
    exact_1d: bool = False,
    bucket_size: int = 2**27,
) -> TwoPhase:
    r"""Averages over the workers in two phases, through any codec, with both errors.

    Each worker i encodes its values plus its error; each serves an equal share of the
    blocks, averages what it is sent, and encodes the average again:

    .. math::
      \hat x^{(i)} &= C[x^{(i)} + \delta^{(i)}], \quad
      \delta^{(i)} \leftarrow x^{(i)} + \delta^{(i)} - \hat x^{(i)} \\
      \bar x &= C[\tfrac1n \textstyle\sum_i \hat x^{(i)} + \bar\delta], \quad
      \bar\delta \leftarrow \tfrac1n \textstyle\sum_i \hat x^{(i)} + \bar\delta
      - \bar x

    with :math:`C` encoding and decoding. The sum over steps of what is returned differs
    from the sum of the exact means by no more than the errors held at the end. On the
    wire: for each bucket one all-to-all (between two workers an all-gather) and one
    all-gather of `codec.words` words a block.

    A value that is not finite, on any worker, makes its block not finite on all.

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.
      codec: what blocks are encoded by.
      name: the exchange's name, for error messages; None for that of the codec's class.
      error_dtype: dtype of the stored errors, float32 or bfloat16, which halves their
        memory and loses what rounding drops.
      exact_below: leaves of fewer values are averaged exactly, all in one all-reduce.
        None for `codec.words` + 1: a leaf of fewer values takes no more bytes exactly
        than as one block.
      exact_1d: whether leaves of fewer than two dimensions are averaged exactly too.
      bucket_size: the most values that one pair of collectives exchanges, but at least
        a block from every worker to every server. The collectives of one bucket can
        overlap with the computation of another.

    Returns:
      An exchange. Its state is an `ErrorFeedbackState`; `update` computes in float32
      and returns the dtype that it is given.

    Raises:
      ValueError: if `error_dtype` is neither, `bucket_size` or a size of the codec is
        less than 1. Also if the codec's words or values do not have the shapes and
        dtypes that it must give.
      TypeError: if `codec` is not a codec.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> class Halves(onebit_jax.Codec):
      ...     block_size = 64
      ...     words = 32  # two bfloat16 values a word
      ...     def encode(self, blocks, counts):
      ...         pairs = blocks.astype(jnp.bfloat16).reshape(-1, 32, 2)
      ...         return jax.lax.bitcast_convert_type(pairs, jnp.uint32)
      ...     def decode(self, words):
      ...         pairs = jax.lax.bitcast_convert_type(words, jnp.bfloat16)
      ...         return pairs.reshape(*words.shape[:-1], 64).astype(jnp.float32)
      >>> exchange = two_phase('data', Halves(), exact_below=0)
      >>> def mean(g):
      ...     return exchange.update(g, exchange.init(g))[0]
      >>> own = jnp.array([[1.0, 2.0], [3.0, 2.0]])
      >>> print(jax.jit(jax.vmap(mean, axis_name='data'))(own)[0])
      [2. 2.]

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888, Algorithm 1.
    """
    check_codec(codec)
    return TwoPhase(
        name=name or type(codec).__name__,
        axes=as_tuple(axis),
        codec=codec,
        error_dtype=error_dtype,
        exact_below=codec.words + 1 if exact_below is None else exact_below,
        exact_1d=exact_1d,
        bucket_size=bucket_size,
    )


def _to_servers(
    message: UInt32[Array, "n served words"], axes: tuple[str, ...]
) -> UInt32[Array, "n served words"]:
    """Sends each worker the blocks that it serves, of all workers in any order."""
    if message.shape[0] != 2:
        return lax.all_to_all(message, axes, 0, 0)
    # Two workers swap halves. Gloo's all-to-all asks for the other's half behind its
    # own, so that on a slow link one is sent after the other; its all-gather does not.
    here = lax.axis_index(axes)
    given = lax.all_gather(
        lax.dynamic_index_in_dim(message, 1 - here, keepdims=False), axes
    )
    kept = lax.dynamic_index_in_dim(message, here, keepdims=False)
    return jnp.stack([kept, lax.dynamic_index_in_dim(given, 1 - here, keepdims=False)])
