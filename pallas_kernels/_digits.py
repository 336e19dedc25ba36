"""Sums of several values in one word, each a digit in a base that is large enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32, UInt32

WORD = 2**32


def digits_of_word(terms: int) -> int:
    """The number of digits of base `terms` + 1 that a word of 32 bits holds.

    Args:
      terms: n, one less than the base.

    Returns:
      A number of digits, at least 1.

    Example:
      >>> [digits_of_word(n) for n in (1, 2, 3, 4, 8, 64)]
      [32, 20, 16, 13, 10, 5]
    """
    digits = 1
    while (terms + 1) ** (digits + 1) <= WORD:
        digits += 1
    return digits


def pack_digits(
    digits: UInt32[Array, "b block_size"], terms: int
) -> UInt32[Array, "b w"]:
    r"""Packs digits of base `terms` + 1 into words.

    Word j of a block is :math:`\sum_k d_{k W + j} (n + 1)^k` for n terms and W words
    a block. If the digits are 0 and 1, n such words can be added: a digit of their sum
    is at most n, so that nothing carries.

    Args:
      digits: 0 to n; 0 or 1 where words will be added.
      terms: n, one less than the base: how many words of 0 and 1 may be added.

    Returns:
      The words.

    Example:
      >>> import jax.numpy as jnp
      >>> pack_digits(jnp.array([[1, 0, 1]], jnp.uint32), terms=9)
      Array([[101]], dtype=uint32)
    """
    places = digits_of_word(terms)
    width = -(-digits.shape[1] // places)
    padded = jnp.pad(digits, ((0, 0), (0, places * width - digits.shape[1])))
    words = jnp.uint32(0)
    for place in range(places):
        digit = padded[:, place * width : (place + 1) * width]
        words = words + digit * jnp.uint32((terms + 1) ** place)
    return words


def unpack_digits(
    words: UInt32[Array, "b w"], terms: int, block_size: int
) -> Float32[Array, "b block_size"]:
    """Restores digits from words, or from a sum of words, that `pack_digits` made.

    Args:
      words: the words, or their sum.
      terms: n, one less than the base.
      block_size: digits a block.

    Returns:
      The digits, exact in float32; of a sum of words of 0 and 1, how many had a 1.

    Example:
      >>> import jax.numpy as jnp
      >>> ones = pack_digits(jnp.array([[1, 0, 1]], jnp.uint32), terms=2)
      >>> unpack_digits(ones + ones, terms=2, block_size=3)
      Array([[2., 0., 2.]], dtype=float32)
    """
    base = jnp.uint32(terms + 1)
    digits = []
    for _ in range(digits_of_word(terms)):
        rest = words // base
        # A digit is less than 2**16, which every backend converts as a signed number.
        digits.append((words - rest * base).astype(jnp.int32).astype(jnp.float32))
        words = rest
    return jnp.concatenate(digits, axis=1)[:, :block_size]
