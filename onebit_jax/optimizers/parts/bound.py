"""A bound of updates after the freeze."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32

BOUND = 3.0
"""Below Adam's own largest update, 7.3, and above its usual ones, of at most 1."""


def cut(updates: optax.Updates, bound: ArrayLike | None) -> optax.Updates:
    """Updates cut to a bound.

    Args:
      updates: float32.
      bound: the largest magnitude of a coordinate; None for no bound.

    Returns:
      The updates, none beyond the bound.
    """
    if bound is None:
        return updates
    limit = jnp.asarray(bound, jnp.float32)
    return optax.tree.clip(updates, -limit, limit)


def share_beyond(updates: optax.Updates, bound: ArrayLike | None) -> Float32[Array, ""]:
    """The share of coordinates that are beyond a bound; 0 without one."""
    if bound is None:
        return jnp.zeros([], jnp.float32)
    limit = jnp.asarray(bound, jnp.float32)
    leaves = jax.tree.leaves(updates)
    beyond = [jnp.sum(jnp.abs(u) > limit, dtype=jnp.float32) for u in leaves]
    size = float(max(sum(u.size for u in leaves), 1))
    return jnp.asarray(sum(beyond) / size, jnp.float32)
