"""Updates of a step that changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from onebit_jax.workers.axes import to_varying, varying_axes

if TYPE_CHECKING:
    from collections.abc import Callable

    import optax


def no_update(update: Callable[[], tuple[optax.Updates, Any]]) -> optax.Updates:
    """Updates that leave parameters as they are, typed as those of `update`.

    They are negative zeros: adding a positive zero to a parameter of -0.0 would
    change its bits.

    Args:
      update: the other branch of a `lax.cond`, which decides the types.
    """
    updates, _ = jax.eval_shape(update)

    def zeros(aval: jax.ShapeDtypeStruct) -> jax.Array:
        x = jnp.full(aval.shape, -0.0, aval.dtype)
        return to_varying(x, tuple(varying_axes(aval)))

    return jax.tree.map(zeros, updates)
