"""Measures of a run, told by the optimizer's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from onebit_jax.workers.nodes import nodes_with

if TYPE_CHECKING:
    from jax import Array


@jax.jit
def metrics(state: Any) -> dict[str, Array]:
    r"""Measures of the optimizer, from its state.

    A node of the state that has a method `metrics` tells its own: a dictionary of
    scalars. Of several processes all must call it, not process 0 alone: norms of
    worker-local state are sums over the workers.

    Args:
      state: an optimizer's state with global arrays, outside `shard_map`.

    Returns:
      Scalars by name, of several nodes that tell the same, as in `optax.partition`,
      the largest. From 1-bit Adam: 'count', steps taken; 'compressed', 1 once the
      variance is frozen; 'frozen_at', warm-up steps taken by then; 'floored_share',
      the share of the frozen variances that the floor raised; 'bounded_share', the
      share of updates that were cut to the bound, when last measured; 'worker_error',
      :math:`\sqrt{\frac1n \sum_i \|\delta^{(i)}\|^2} / \|m\|`, and 'server_error',
      :math:`\|\bar\delta\| / \|m\|`, errors of what is sent: gradients, which are
      larger than their momentum m, or momenta. From 1-bit LAMB the same, and
      'largest_factor', the largest factor on a layer's frozen ratio; its errors are
      those of momenta brought to one magnitude, and its share of updates is that of the
      last step. From `skip_nonfinite`: 'skipped', steps skipped. From
      `clip_by_worker_norm`: 'clipped_share', the share of steps clipped.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.onebit_adam(
      ...     1e-3, onebit_jax.sign_mean('data'), onebit_jax.freeze_at(10))
      >>> print(metrics(onebit_jax.init(tx, jnp.zeros(3), mesh))['compressed'])
      0
    """
    measures: dict[str, Any] = {}
    for node in nodes_with((state,), "metrics"):
        for name, value in node.metrics().items():
            before = measures.get(name, value)
            measures[name] = jnp.maximum(before, value)
    return measures
