"""Measures of a run, told by the optimizer's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from onebit_jax.workers.states import declared

if TYPE_CHECKING:
    from jax import Array


@jax.jit
def metrics(state: Any) -> dict[str, Array]:
    """Measures of the optimizer, from its state.

    Each state in it that is declared by `optimizer_state` tells its own. Of several
    processes all must call it, not process 0 alone: norms of worker-local state are
    sums over the workers.

    Args:
      state: an optimizer's state with global arrays, outside `shard_map`.

    Returns:
      Scalars by name; of several states that tell the same name, as in
      `optax.partition`, the largest. What each measures is told by its type.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.onebit_adam(
      ...     1e-3, onebit_jax.sign_mean('data'), onebit_jax.freeze_at(10))
      >>> print(metrics(onebit_jax.init(tx, jnp.zeros(3), mesh))['compressed'])
      0
    """
    measures: dict[str, Any] = {}
    for node in declared(state):
        for name, value in node.metrics().items():
            before = measures.get(name, value)
            measures[name] = jnp.maximum(before, value)
    return measures
