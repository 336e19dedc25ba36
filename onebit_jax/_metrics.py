"""What an optimizer's state tells about the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from onebit_jax._clip import squared_norm
from onebit_jax._onebit_adam import ScaleByOnebitAdamState
from onebit_jax._per_worker import PerWorker
from onebit_jax._skip import SkipNonfiniteState

if TYPE_CHECKING:
    from jax import Array


@jax.jit
def metrics(state: Any) -> dict[str, Array]:
    r"""Measures of the optimizer, from its state.

    Args:
      state: an optimizer's state with global arrays, outside `shard_map`.

    Returns:
      Scalars, as far as the state holds what they are made of. From 1-bit Adam:
      'count', steps taken; 'compressed', 1 once the variance is frozen;
      'frozen_at', warm-up steps taken by then; 'floored_share', the share of the
      frozen variances that were raised to their leaf's mean; 'worker_error',
      :math:`\sqrt{\frac1n \sum_i \|\delta^{(i)}\|^2} / \|m\|`, and 'server_error',
      :math:`\|\bar\delta\| / \|m\|`. Errors are of gradients, which are larger than
      their momentum m; with `as_published`, of momenta. From `skip_nonfinite`:
      'skipped', steps skipped. Of several optimizers, as in `optax.partition`, the
      sums of 'skipped' and of norms, and the first one's stage.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.onebit_adam(
      ...     1e-3, onebit_jax.sign_mean('data'), onebit_jax.freeze_at(10))
      >>> print(metrics(onebit_jax.init(tx, jnp.zeros(3), mesh))['compressed'])
      0
    """
    found: dict[str, Any] = {}
    skips = _nodes(state, SkipNonfiniteState)
    if skips:
        found["skipped"] = sum((s.skipped for s in skips), start=jnp.int32(0))
    adams = _nodes(state, ScaleByOnebitAdamState)
    if adams:
        sizes = [sum(m.size for m in jax.tree.leaves(a.mu)) for a in adams]
        floored = sum(
            (a.floored * size for a, size in zip(adams, sizes, strict=True)),
            start=jnp.float32(0),
        )
        momentum = jnp.sqrt(squared_norm([a.mu for a in adams]))
        errors = [e for a in adams for e in _nodes(a.exchange, PerWorker)]
        found |= {
            "count": adams[0].count,
            "compressed": (adams[0].frozen_at > 0).astype(jnp.int32),
            "frozen_at": adams[0].frozen_at,
            "floored_share": floored / max(sum(sizes), 1),
            "worker_error": _relative(
                [e for e in errors if e.role == "each"], momentum
            ),
            "server_error": _relative(
                [e for e in errors if e.role != "each"], momentum
            ),
        }
    return found


def _nodes(tree: Any, kind: type) -> list[Any]:
    """The nodes of a kind, including those inside one another."""
    at = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    found = [node for node in at if isinstance(node, kind)]
    if issubclass(kind, SkipNonfiniteState):
        found += [deeper for node in found for deeper in _nodes(node.inner, kind)]
    return found


def _relative(errors: list[PerWorker], momentum: Array) -> Array:
    """The norm of errors, of one worker where each has its own, beside momentum's."""
    squares = jnp.float32(0)
    for error in errors:
        for leaf in jax.tree.leaves(error):
            sharing = leaf.shape[0] if error.role == "each" else 1
            squares += squared_norm(leaf) / sharing
    # Before the first step both are zero, and nothing is owed.
    return jnp.where(
        momentum > 0, jnp.sqrt(squares) / jnp.where(momentum > 0, momentum, 1), 0
    )
