"""An exchange of 2, 4 or 8 bits a value with error feedback."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Literal

import jax.numpy as jnp
from jax import lax

from onebit_jax.exchanges.codec import Codec
from onebit_jax.exchanges.two_phase import two_phase
from pallas_kernels import check_block_size

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float32, Int32, UInt32

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.workers.axes import AxisNames

Bits = Literal[2, 4, 8]

# Of normally distributed values, the distance between the levels -1, 0 and 1 that
# makes the smallest error, in root mean squares.
_TERNARY_STEP = 1.224


def quantized_mean(
    axis: AxisNames,
    bits: Bits = 4,
    *,
    block_size: int = 1024,
    error_dtype: DTypeLike = jnp.float32,
    exact_below: int | None = None,
    exact_1d: bool = False,
    bucket_size: int = 2**27,
) -> Exchange:
    r"""Averages over the workers, sending 2, 4 or 8 bits a value and a scale a block.

    `two_phase` with whole multiples of a step :math:`s_b` for each block b,

    .. math::
      C[x] = s_b\, \mathrm{clip}(\mathrm{round}(x / s_b), \pm L), \quad
      L = 2^{bits - 1} - 1, \quad
      s_b = \max_{i \in b} |x_i| / L

    and for 2 bits, where L is 1, :math:`s_b = 1.224\,\mathrm{rms}(x)`, the step of the
    smallest error for normally distributed values. Zero is a level, so that no
    coordinate's error is larger than its value. With 2 bits a block is not finite where
    the sum of its squares overflows: 1,024 values of 5.8e17.

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.
      bits: of a value on the wire.
      block_size: how many consecutive values share one scale; a power of two from 32 to
        2**24.
      error_dtype: dtype of the stored errors, float32 or bfloat16.
      exact_below: leaves of fewer values are averaged exactly, all in one all-reduce.
        None for `block_size * bits / 32 + 2`: a leaf of fewer values takes no more
        bytes exactly than as one block.
      exact_1d: whether leaves of fewer than two dimensions are averaged exactly too:
        a small part of a model's values, and the most sensitive one.
      bucket_size: the most values that one pair of collectives exchanges, but at least
        a block from every worker to every server.

    Returns:
      An exchange. Its state is an `ErrorFeedbackState`; `update` computes in float32
      and returns the dtype that it is given.

    Raises:
      ValueError: if an argument is not one of these.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> exchange = quantized_mean('data', exact_below=0)
      >>> def mean(g):
      ...     return exchange.update(g, exchange.init(g))[0]
      >>> own = jnp.array([[7.0, -2.1, 0.4], [7.0, -2.1, 0.4]])
      >>> jax.jit(jax.vmap(mean, axis_name='data'))(own)[0]
      Array([ 7., -2.,  0.], dtype=float32)

    References:
      Seide et al., 1-bit stochastic gradient descent, 2014, for error feedback of
      quantised gradients; Tang et al., 1-bit Adam, 2021,
      https://arxiv.org/abs/2102.02888, Algorithm 1, for both errors.
    """
    return two_phase(
        axis,
        IntegerCodec(bits, block_size),
        name="quantized_mean",
        error_dtype=error_dtype,
        exact_below=exact_below,
        exact_1d=exact_1d,
        bucket_size=bucket_size,
    )


@dataclasses.dataclass(frozen=True)
class IntegerCodec(Codec):
    """Whole multiples of a block's step, and the step in the words' last column.

    Attributes:
      bits: of a value.
      block_size: number of values in a block.
    """

    bits: Bits
    block_size: int

    def __post_init__(self) -> None:
        for name in ("bits", "block_size"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8, got {self.bits!r}.")
        check_block_size(self.block_size)

    @property
    def words(self) -> int:
        """Words of the values, and one for the step."""
        return self.block_size * self.bits // 32 + 1

    @property
    def largest(self) -> int:
        """The largest multiple, L."""
        return 2 ** (self.bits - 1) - 1

    def encode(
        self, blocks: Float32[Array, "b block_size"], counts: Int32[Array, " b"]
    ) -> UInt32[Array, "b words"]:
        """Multiples, as many to a word as fit, of rows of the block."""
        if self.largest == 1:
            sizes = jnp.maximum(counts, 1).astype(jnp.float32)
            mean_square = jnp.sum(jnp.square(blocks), axis=1) / sizes
            steps = _TERNARY_STEP * jnp.sqrt(mean_square)
        else:
            steps = jnp.max(jnp.abs(blocks), axis=1) / self.largest
        # A block of zeros has no step; one that is not finite has none either.
        divisor = jnp.where((steps > 0) & jnp.isfinite(steps), steps, 1)[:, None]
        multiples = jnp.clip(jnp.round(blocks / divisor), -self.largest, self.largest)
        codes = (multiples.astype(jnp.int32) + self.largest).astype(jnp.uint32)
        rows = codes.reshape(len(codes), 32 // self.bits, self.words - 1)
        words = jnp.zeros((len(codes), self.words - 1), jnp.uint32)
        for row in range(32 // self.bits):
            words = words | (rows[:, row] << jnp.uint32(row * self.bits))
        bits = lax.bitcast_convert_type(steps, jnp.uint32)
        return jnp.concatenate([words, bits[:, None]], axis=1)

    def decode(
        self, words: UInt32[Array, "*n words"]
    ) -> Float32[Array, "*n block_size"]:
        """The multiples times the step."""
        packed = words[..., None, :-1]
        shape = (*words.shape[:-1], 32 // self.bits, packed.shape[-1])
        rows = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2)
        codes = (packed >> (rows * self.bits)) & jnp.uint32(2**self.bits - 1)
        multiples = codes.astype(jnp.int32) - self.largest
        steps = lax.bitcast_convert_type(words[..., -1], jnp.float32)
        values = multiples.astype(jnp.float32) * steps[..., None, None]
        return values.reshape(*words.shape[:-1], self.block_size)
