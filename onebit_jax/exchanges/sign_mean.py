"""A 1-bit exchange with error feedback: signs there and back."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from onebit_jax.exchanges.codec import Codec
from onebit_jax.exchanges.two_phase import two_phase
from pallas_kernels import (
    average_and_recompress,
    check_block_size,
    check_name,
    check_scale,
    compress,
    decompress,
    pack_signs,
    unpack_signs,
)

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Float32, Int32, UInt32

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.workers.axes import AxisNames
    from pallas_kernels import Implementation, Scale


def sign_mean(
    axis: AxisNames,
    *,
    block_size: int = 1024,
    scale: Scale = "rms",
    error_dtype: DTypeLike = jnp.float32,
    exact_below: int | None = None,
    exact_1d: bool = False,
    bucket_size: int = 2**27,
    implementation: Implementation | None = None,
) -> Exchange:
    r"""Averages over the workers, sending one sign a value and one scale a block.

    `two_phase` with a sign a value and a scale for each block b,

    .. math:: C[x] = s_b\,\mathrm{sign}(x), \quad s_b = \|x\|_2 / \sqrt{|b|}

    so that what is sent is as large as what it stands for. Each collective carries
    (1 + 32 / block_size) bits a value.

    A value that is not finite, on any worker, makes its block not finite on all.

    What is returned has one magnitude a block, from which an adaptive optimizer learns
    no coordinate's second moment: use `onebit_adam`, or `quantized_mean` before it.

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.
      block_size: how many consecutive values share one scale; a power of two from 32 to
        2**24.
      scale: 'rms' for the root mean square, as in the paper, or 'mean_abs' for the mean
        magnitude, whose error is the smallest: :math:`\|x - C[x]\|^2 = \|x\|^2 -
        \|x\|_1^2 / |b|`, less than :math:`\|x\|^2` whatever x is. With 'rms' the error
        is larger than that, even than :math:`\|x\|^2` where a few values of a block are
        far larger than the others. Scale and error are not finite where the sum of a
        block's squares overflows, as of 1,024 values of 5.8e17. 1-bit Adam learnt no
        worse by 'rms' in any study of docs/convergence.md; gradients of your own that
        are sparse are safer with 'mean_abs'.
      error_dtype: dtype of the stored errors, float32 or bfloat16, which halves their
        memory and loses what rounding drops.
      exact_below: leaves of fewer values are averaged exactly, all in one all-reduce.
        None for block_size / 32 + 2: a leaf of fewer values takes no more bytes exactly
        than as one block.
      exact_1d: whether leaves of fewer than two dimensions are averaged exactly too.
      bucket_size: the most values that one pair of collectives exchanges, but at least
        a block from every worker to every server. The collectives of one bucket can
        overlap with the computation of another.
      implementation: what compresses: 'xla', 'mosaic' (kernels for NVIDIA GPUs from
        Hopper on) or 'mosaic_interpreted' (the same, slow, on a CPU). None is for
        'xla', and for 'mosaic' on GPUs where that was measured to be faster: none yet.

    Returns:
      An exchange. Its state is an `ErrorFeedbackState`; `update` computes in float32
      and returns the dtype that it is given.

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
    codec = SignCodec(block_size, scale, implementation)
    return two_phase(
        axis,
        codec,
        name="sign_mean",
        error_dtype=error_dtype,
        exact_below=exact_below,
        exact_1d=exact_1d,
        bucket_size=bucket_size,
    )


@dataclasses.dataclass(frozen=True)
class SignCodec(Codec):
    """A sign a value and a scale a block, in the words' last column.

    Attributes:
      block_size: how many consecutive values share one scale; a power of two from 32 to
        2**24.
      scale: 'rms' for the root mean square, or 'mean_abs' for the mean magnitude.
      implementation: what computes; as of `sign_mean`.
    """

    block_size: int
    scale: Scale
    implementation: Implementation | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", operator.index(self.block_size))
        check_block_size(self.block_size)
        check_scale(self.scale)
        check_name(self.implementation)

    @property
    def words(self) -> int:
        """A word for 32 signs, and one for the scale."""
        return self.block_size // 32 + 1

    def encode(
        self, blocks: Float32[Array, "b block_size"], counts: Int32[Array, " b"]
    ) -> UInt32[Array, "b words"]:
        """Signs, and the scale of the values that are not padding."""
        magnitude = jnp.square(blocks) if self.scale == "rms" else jnp.abs(blocks)
        means = jnp.sum(magnitude, axis=1) / jnp.maximum(counts, 1).astype(jnp.float32)
        scales = jnp.sqrt(means) if self.scale == "rms" else means
        rows = blocks.reshape(-1, 32, self.block_size // 32)
        return _message(pack_signs(rows), scales)

    def decode(
        self, words: UInt32[Array, "*n words"]
    ) -> Float32[Array, "*n block_size"]:
        """The scale, with each value's sign."""
        values = unpack_signs(*split_message(words))
        return values.reshape(*words.shape[:-1], self.block_size)

    def encode_with_error(
        self,
        value: Float[Array, " size"],
        error: Float[Array, " size"],
        *,
        momentum: Float32[Array, " size"] | None = None,
        decay: Any = None,
        counts: Int32[Array, " b"] | None = None,
    ) -> tuple[UInt32[Array, "b words"], Float[Array, " size"]]:
        """In two passes over memory."""
        words, scales, new_error = compress(
            value,
            error,
            block_size=self.block_size,
            scale=self.scale,
            momentum=momentum,
            decay=None if momentum is None else decay,
            counts=counts,
            implementation=self.implementation,
        )
        return _message(words, scales), new_error

    def average_and_encode(
        self,
        words: UInt32[Array, "n b words"],
        error: Float[Array, " size"],
        counts: Int32[Array, " b"],
    ) -> tuple[UInt32[Array, "b words"], Float[Array, " size"]]:
        """In one pass over memory."""
        signs, scales, new_error = average_and_recompress(
            *split_message(words),
            error,
            counts,
            scale=self.scale,
            implementation=self.implementation,
        )
        return _message(signs, scales), new_error

    def decode_flat(
        self,
        words: UInt32[Array, "b words"],
        size: int,
        dtype: DTypeLike,
        into: Float[Array, " size"] | None = None,
    ) -> Float[Array, " size"]:
        """By XLA, which fuses it with what the optimizer does next."""
        return decompress(*split_message(words), size, dtype, into=into)


def _message(
    words: UInt32[Array, "b w"], scales: Float32[Array, " b"]
) -> UInt32[Array, "b w+1"]:
    # Scales travel in the words' array: half as many collectives.
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    return jnp.concatenate([words, bits[:, None]], axis=1)


def split_message(
    message: UInt32[Array, "*n b w+1"],
) -> tuple[UInt32[Array, "*n b w"], Float32[Array, "*n b"]]:
    """Signs and scales of a message."""
    scales = lax.bitcast_convert_type(message[..., -1], jnp.float32)
    return message[..., :-1], scales
