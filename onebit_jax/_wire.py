"""What an exchange does with a bucket of compressed blocks: its wire format."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
import operator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import jax.numpy as jnp

from onebit_jax import _axes
from pallas_kernels import check_block_size, check_name, compress, unpack_signs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Float32, Int32, UInt32

    from pallas_kernels import Implementation


class Tails(NamedTuple):
    """Blocks in the middle of a buffer that end with padding.

    Attributes:
      places: which blocks; those past the buffer's end are none of its own.
      counts: how many values each of them has.
    """

    places: Int32[Array, " t"]
    counts: Int32[Array, " t"]

    def clear(self, flat: Float[Array, " size"], block_size: int) -> Array:
        """The buffer with zeros for the padding of these blocks."""
        blocks = flat.reshape(-1, block_size)
        rows = blocks.at[self.places].get(mode="fill", fill_value=0)
        rows = jnp.where(self._are_values(block_size), rows, 0)
        return blocks.at[self.places].set(rows, mode="drop").reshape(-1)

    def _are_values(self, block_size: int) -> Array:
        return jnp.arange(block_size, dtype=jnp.int32)[None] < self.counts[:, None]


class Part(NamedTuple):
    """A run of whole blocks that one buffer is compressed to.

    Attributes:
      value: what is to be sent; with a momentum, the gradient.
      error: what is owed.
      momentum: float32, the same on all workers; None for a value as it is.
      tails: blocks but the last that end with padding, where the value is zero.
    """

    value: Float[Array, " size"]
    error: Float[Array, " size"]
    momentum: Float32[Array, " size"] | None = None
    tails: Tails | None = None


def sign_delay(scale: Literal["rms", "mean_abs"]) -> float:
    r"""Steps by which error feedback makes signs of one scale late, in the mean.

    They send a share :math:`\alpha = \langle C[x], x \rangle / \|x\|^2` of what is
    owed; a share :math:`\alpha (1 - \alpha)^k` is sent k steps late, in the mean

    .. math:: \sum_k k\, \alpha (1 - \alpha)^k = \frac{1}{\alpha} - 1

    with :math:`\alpha = 2 / \pi` of normally distributed values and their mean
    magnitude, :math:`\sqrt{2 / \pi}` and their root mean square.

    Args:
      scale: 'rms' or 'mean_abs'.

    Returns:
      Steps, 0.57 for the mean magnitude and 0.25 for the root mean square.

    Example:
      >>> round(sign_delay('mean_abs'), 3)
      0.571
    """
    late = math.pi / 2
    return (late if scale == "mean_abs" else math.sqrt(late)) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wire(abc.ABC):
    """A wire format over worker axes, with what its exchange is asked for.

    Attributes:
      who: the exchange's name, for messages.
      axes: the worker axes that blocks are exchanged over.
      block_size: values a scale.
      scale: 'rms' or 'mean_abs'.
      error_dtype: dtype of stored errors.
      exact_below: leaves of fewer values are exchanged exactly; whatever the number
        of workers, as a state is converted to other numbers.
      bucket_size: the most values that are exchanged by one collective.
      implementation: what compresses.
    """

    who: str
    axes: tuple[str, ...]
    block_size: int
    scale: Literal["rms", "mean_abs"]
    error_dtype: Any
    exact_below: int
    bucket_size: int
    implementation: Implementation | None

    @classmethod
    def of(
        cls,
        who: str,
        axis: _axes.AxisNames,
        *,
        block_size: int,
        scale: Literal["rms", "mean_abs"],
        error_dtype: DTypeLike,
        exact_below: int | None,
        bucket_size: int,
        implementation: Implementation | None = None,
    ) -> Self:
        """Checks what a user asks for."""
        block_size = operator.index(block_size)
        check_block_size(block_size)
        if scale not in ("rms", "mean_abs"):
            raise ValueError(f"scale must be 'rms' or 'mean_abs', got {scale!r}.")
        check_name(implementation)
        dtype = jnp.dtype(error_dtype)
        if dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"error_dtype must be float32 or bfloat16, got {dtype}.")
        if exact_below is None:
            # Exactly, a value is a word; a block is its signs and its scale.
            exact_below = block_size // 32 + 2
        bucket_size = operator.index(bucket_size)
        if bucket_size < 1:
            raise ValueError(f"bucket_size must be positive, got {bucket_size}.")
        return cls(
            who=who,
            axes=_axes.as_tuple(axis),
            block_size=block_size,
            scale=scale,
            error_dtype=dtype,
            exact_below=operator.index(exact_below),
            bucket_size=bucket_size,
            implementation=implementation,
        )

    @property
    @abc.abstractmethod
    def has_server(self) -> bool:
        """Whether workers serve blocks, and owe something as servers."""

    @property
    def delay(self) -> float:
        """Steps by which what is agreed is behind normally distributed values."""
        return sign_delay(self.scale) * (2 if self.has_server else 1)

    @abc.abstractmethod
    def exchange(
        self,
        parts: Sequence[Part],
        decay: Any,
        counts: Int32[Array, " blocks"],
        server_error: Float[Array, "1 served block_size"] | None,
    ) -> tuple[UInt32[Array, "blocks w"], list[Array], Array | None]:
        """Exchanges blocks, the same number from every worker.

        Args:
          parts: what the blocks are of, from the first on.
          decay: of the momentum, where the parts have one.
          counts: values of each block that are not padding; a multiple of the workers.
          server_error: of the blocks served here; None without a server.

        Returns:
          A message that is the same on all workers, a row a block; the new errors
          of the parts; the new server error.
        """

    def buckets(self, rows: int, values: int) -> list[slice]:
        """Cuts rows, of so many values each, into buckets of about one size."""
        number = -(-rows // max(1, self.bucket_size // values))
        ends = [rows * k // number for k in range(number + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    @abc.abstractmethod
    def values(
        self,
        message: UInt32[Array, "b w"],
        size: int,
        dtype: DTypeLike,
        into: Float32[Array, " size"] | None,
    ) -> Float[Array, " size"]:
        """The mean that rows of an agreed message stand for, in a free buffer."""

    def compress(
        self, part: Part, decay: Any
    ) -> tuple[UInt32[Array, "b w"], Float32[Array, " b"], Float[Array, " size"]]:
        """Signs, scales and new error of a part."""
        value, error, momentum, tails = part
        words, scales, new_error = compress(
            value,
            error,
            block_size=self.block_size,
            scale=self.scale,
            momentum=momentum,
            decay=None if momentum is None else decay,
            implementation=self.implementation,
        )
        if tails is None:
            return words, scales, new_error
        # Padding took part in their scales as zeros: fewer values share the sum.
        size = self.block_size
        own = scales.at[tails.places].get(mode="fill", fill_value=0)
        share = jnp.maximum(tails.counts, 1).astype(jnp.float32) / size
        larger = own / (jnp.sqrt(share) if self.scale == "rms" else share)
        signs = words.at[tails.places].get(mode="fill", fill_value=0)
        change = unpack_signs(signs, larger - own).reshape(-1, size)
        blocks = new_error.reshape(-1, size)
        blocks = blocks.at[tails.places].add(-change.astype(error.dtype), mode="drop")
        scales = scales.at[tails.places].set(larger, mode="drop")
        return words, scales, tails.clear(blocks.reshape(-1), size)
