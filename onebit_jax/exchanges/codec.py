"""Codecs: how blocks of values become words on the wire, and values again."""

from __future__ import annotations

import abc
import numbers
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import running_mean, to_blocks

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Float32, Int32, UInt32


class Codec(abc.ABC):
    """From blocks of float32 values to 32-bit words and back.

    A subclass is a frozen dataclass that says how many `words` a block takes, how
    blocks are encoded and how they are decoded. What an encoding loses becomes the
    error, which is added to the next values. The other methods are made of these; a
    codec overrides them where it can do them in fewer passes over memory.

    Attributes:
      block_size: number of values in a block.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp
      >>> from onebit_jax import Codec
      >>> @dataclasses.dataclass(frozen=True)
      ... class Bytes(Codec):
      ...     step: float
      ...     block_size = 4
      ...     words = 1
      ...     def encode(self, blocks, counts):
      ...         levels = jnp.clip(jnp.round(blocks / self.step), -127, 127)
      ...         return jax.lax.bitcast_convert_type(
      ...             levels.astype(jnp.int8).reshape(-1, 1, 4), jnp.uint32)
      ...     def decode(self, words):
      ...         levels = jax.lax.bitcast_convert_type(words[..., 0], jnp.int8)
      ...         return levels.astype(jnp.float32) * self.step
      >>> value = jnp.array([0.25, -0.5, 0.75])
      >>> words, error = Bytes(0.5).encode_with_error(value, jnp.zeros(3))
      >>> print(Bytes(0.5).decode_flat(words, 3, jnp.float32), error)
      [ 0.  -0.5  1. ] [ 0.25  0.   -0.25]
    """

    block_size: int

    @property
    @abc.abstractmethod
    def words(self) -> int:
        """Words that a block takes on the wire, its scale included."""

    @abc.abstractmethod
    def encode(
        self, blocks: Float32[Array, "b block_size"], counts: Int32[Array, " b"]
    ) -> UInt32[Array, "b words"]:
        """Encodes blocks.

        Args:
          blocks: the values; padding is zero.
          counts: values of each block that are not padding; the first ones are.

        Returns:
          The words. A block with a value that is not finite must be decoded to one.
        """

    @abc.abstractmethod
    def decode(
        self, words: UInt32[Array, "*n words"]
    ) -> Float32[Array, "*n block_size"]:
        """The values that words stand for; of padding, anything."""

    def encode_with_error(
        self,
        value: Float[Array, " size"],
        error: Float[Array, " size"],
        *,
        momentum: Float32[Array, " size"] | None = None,
        decay: Any = None,
        counts: Int32[Array, " b"] | None = None,
    ) -> tuple[UInt32[Array, "b words"], Float[Array, " size"]]:
        r"""Encodes a buffer plus its error: error feedback of a worker.

        .. math:: w = C[x + \delta], \quad \delta' = x + \delta - D[w]

        Args:
          value: what is to be sent; with a momentum, the gradient.
          error: :math:`\delta`, float32 or bfloat16.
          momentum: makes :math:`x = \beta\,momentum + (1 - \beta)\,value`.
          decay: :math:`\beta`, given with the momentum.
          counts: values of each block of a buffer of whole blocks; None for a buffer
            without padding, of which only the last block may be cut short.

        Returns:
          The words and the new error, in the dtype of the error.
        """
        x = running_mean(value, momentum, decay) + error.astype(jnp.float32)
        blocks, cut = to_blocks(x, self.block_size)
        counts = cut if counts is None else counts
        words = stored(self.encode(blocks, counts))
        error_blocks = clear_padding(blocks - self.decode(words), counts)
        return words, error_blocks.reshape(-1)[: x.size].astype(error.dtype)

    def average_and_encode(
        self,
        words: UInt32[Array, "n b words"],
        error: Float[Array, " size"],
        counts: Int32[Array, " b"],
    ) -> tuple[UInt32[Array, "b words"], Float[Array, " size"]]:
        r"""Averages what n workers sent and encodes it again: a server.

        .. math::
          y = \tfrac1n \textstyle\sum_i D[w^{(i)}] + \delta, \quad
          w = C[y], \quad \delta' = y - D[w]

        Args:
          words: of n workers.
          error: :math:`\delta` of b blocks, float32 or bfloat16.
          counts: values of each block that are not padding.

        Returns:
          The words and the new error, zero on padding, in the dtype of the error.
        """
        mean = jnp.mean(self.decode(words), axis=0)
        y = mean + error.astype(jnp.float32).reshape(mean.shape)
        y = clear_padding(y, counts)
        agreed = stored(self.encode(y, counts))
        new_error = clear_padding(y - self.decode(agreed), counts)
        return agreed, new_error.reshape(-1).astype(error.dtype)

    def decode_flat(
        self,
        words: UInt32[Array, "b words"],
        size: int,
        dtype: DTypeLike,
        into: Float[Array, " size"] | None = None,
    ) -> Float[Array, " size"]:
        """The values of a buffer of which the last block may be cut short.

        Args:
          words: of its blocks.
          size: values without padding.
          dtype: of the result.
          into: an array of that size and dtype whose memory the result may take; XLA
            copies it first where it is still needed.

        Returns:
          The values.
        """
        del into
        return self.decode(words).reshape(-1)[:size].astype(dtype)


def check_codec(codec: Codec) -> None:
    """Refuses a codec whose words or blocks are not of the shapes and dtypes told."""
    if not isinstance(codec, Codec):
        raise TypeError(f"two_phase needs an onebit_jax.Codec, got {codec!r}.")
    block = codec.block_size
    integers = all(isinstance(x, numbers.Integral) for x in (block, codec.words))
    if not integers or min(block, codec.words) < 1:
        raise ValueError(
            "a codec's block_size and words must be positive integers, got "
            f"{block!r} and {codec.words!r} of {codec!r}."
        )
    blocks = jax.ShapeDtypeStruct((2, block), jnp.float32)
    counts = jax.ShapeDtypeStruct((2,), jnp.int32)
    words = jax.eval_shape(codec.encode, blocks, counts)
    if (words.shape, words.dtype) != ((2, codec.words), jnp.uint32):
        raise ValueError(
            f"{codec!r} must encode 2 blocks as uint32 words of shape "
            f"{(2, codec.words)}, not as {words.dtype} of {words.shape}."
        )
    values = jax.eval_shape(codec.decode, words)
    if (values.shape, values.dtype) != (blocks.shape, jnp.float32):
        raise ValueError(
            f"{codec!r} must decode 2 blocks to float32 of shape {blocks.shape}, not "
            f"to {values.dtype} of {values.shape}."
        )


def stored(words: UInt32[Array, "*n"]) -> UInt32[Array, "*n"]:
    """Packed words, made once.

    XLA's CPU backend would pack a word again for every value that is unpacked from it,
    where no collective stands between the two: in a codec's error, and everywhere
    between simulated workers.
    """

    def through_a_loop(words: Array) -> Array:
        # Hidden from the compiler, which removes a loop that runs once.
        once = lax.optimization_barrier(jnp.int32(1))
        return lax.fori_loop(0, once, lambda i, x: x | i.astype(x.dtype), words)

    return lax.platform_dependent(words, cpu=through_a_loop, default=lambda x: x)


def clear_padding(
    blocks: Float[Array, "b block_size"], counts: Int32[Array, " b"]
) -> Float[Array, "b block_size"]:
    """The blocks with zeros for their padding."""
    place = jnp.arange(blocks.shape[1], dtype=jnp.int32)[None]
    return jnp.where(place < counts[:, None], blocks, jnp.zeros_like(blocks))
