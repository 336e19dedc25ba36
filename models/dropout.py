"""Dropout whose masks belong to the sequences, not to the workers that hold them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Key

_LEVELS = 1 << 16


def sequence_keys(
    key: Key[Array, ""], indices: Int[Array, " batch"]
) -> Key[Array, " batch"]:
    """One key for each sequence of a whole batch.

    Args:
      key: The step's key.
      indices: Each sequence's place in the whole batch, so that a sequence gets the
        same key on whichever worker it is.

    Returns:
      A key a sequence.
    """
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, indices)


def fold_in(
    keys: Key[Array, " batch"] | None, data: int | Int[Array, ""]
) -> Key[Array, " batch"] | None:
    """`jax.random.fold_in` over a batch of keys; `None` stays `None`."""
    if keys is None:
        return None
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, data)


def dropout(
    x: Float[Array, "batch ..."], rate: float, keys: Key[Array, " batch"] | None
) -> Float[Array, "batch ..."]:
    """Sets a random share of `x` to zero and scales the rest: E[dropout(x)] = x.

    Args:
      x: Activations, the batch first.
      rate: Share that is dropped, to the nearest 1/65536.
      keys: A key a sequence; `None` leaves `x` as it is.

    Returns:
      An array like `x`.
    """
    dropped = min(round(rate * _LEVELS), _LEVELS - 1)
    if keys is None or dropped == 0:
        return x
    size = math.prod(x.shape[1:])

    # 32 random bits decide two elements: random bits are what dropout costs.
    def draw(key: Key[Array, ""]) -> Int[Array, " size"]:
        words = jax.random.bits(key, (-(-size // 2),), jnp.uint32)
        return jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:size]

    keep = (jax.vmap(draw)(keys) >= dropped).reshape(x.shape)
    scale = jnp.asarray(_LEVELS / (_LEVELS - dropped), x.dtype)
    return jnp.where(keep, x * scale, jnp.zeros_like(x))
