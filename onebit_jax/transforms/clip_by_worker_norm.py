"""Clipping by a norm that all workers agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.workers.arithmetic import squared_norm
from onebit_jax.workers.axes import (
    AxisNames,
    as_tuple,
    check_all_axes,
    check_local,
)
from onebit_jax.workers.states import optimizer_state

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32, Int32


@optimizer_state
class ClipByWorkerNormState(NamedTuple):
    """State of `clip_by_worker_norm`.

    Attributes:
      count: number of steps.
      clipped: how many of them had larger norms.
      norm: G of the last step, before it was clipped.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    clipped: Int32[Array, ""]
    norm: Float32[Array, ""]

    def metrics(self) -> dict[str, Array]:
        """The share of steps that were clipped, and G; see `onebit_jax.metrics`."""
        share = self.clipped / jnp.maximum(self.count, 1)
        return {"clipped_share": share, "worker_norm": self.norm}


def clip_by_worker_norm(
    max_norm: ArrayLike, axis: AxisNames
) -> optax.GradientTransformation:
    r"""Scales all workers' gradients by one factor, from the norms of all of them.

    .. math::
      g^{(i)} \leftarrow g^{(i)} \min\left(1, \frac{max\_norm}{G}\right), \quad
      G = \sqrt{\tfrac1n \textstyle\sum_i \|g^{(i)}\|_2^2}

    The norm of the mean gradient, which `optax.clip_by_global_norm` takes, is not
    known where gradients are not exchanged. G is never smaller than it, is the same
    on all workers, costs one scalar all-reduce, and does not depend on the optimizer's
    stage.
    Where G, in float32, is not finite, no gradient that is returned is: a
    `skip_nonfinite` around this or after it skips the step.

    Args:
      max_norm: the largest G that is left as it is.
      axis: name, or names, of the mesh axes whose members are the workers.

    Returns:
      A transformation to be chained before an exchange, inside `jax.shard_map`. Its
      state counts the steps that were clipped: where they are many, all gradients have
      one norm, and the variance cannot see them grow.

    Raises:
      ValueError: if `max_norm` is a number that is not more than 0. From `update`, if
        gradients are averaged already, an axis is not bound, or gradients differ over
        other axes than the workers'.
      TypeError: from `update`, for gradients that are not real floating-point.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = clip_by_worker_norm(2.5, 'data')
      >>> def clipped(g):
      ...     return tx.update(g, tx.init(g))[0]
      >>> own = jnp.array([[1.0, -7.0], [0.0, 0.0]])  # G = 5
      >>> print(jax.vmap(clipped, axis_name='data')(own))
      [[ 0.5 -3.5]
       [ 0.   0. ]]
    """
    if isinstance(max_norm, (int, float)) and not max_norm > 0:
        raise ValueError(f"max_norm must be more than 0, got {max_norm}.")
    axes = as_tuple(axis)

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, ClipByWorkerNormState]:
        del params
        check_local(updates, axes, "clip_by_worker_norm")
        check_all_axes(updates, axes, "clip_by_worker_norm")
        norm = jnp.sqrt(lax.pmean(squared_norm(updates), axes))
        factor = jnp.minimum(1.0, jnp.asarray(max_norm, jnp.float32) / norm)
        # By an infinite norm all would be divided to zeros, which pass for gradients.
        factor = jnp.where(jnp.isfinite(norm), factor, jnp.nan)
        state = ClipByWorkerNormState(
            jnp.asarray(optax.safe_increment(state.count)),
            jnp.where(factor < 1, optax.safe_increment(state.clipped), state.clipped),
            norm,
        )
        return jax.tree.map(lambda g: _scaled(g, factor), updates), state

    def init_fn(params: optax.Params) -> ClipByWorkerNormState:
        del params
        return ClipByWorkerNormState(
            count=jnp.zeros([], jnp.int32),
            clipped=jnp.zeros([], jnp.int32),
            norm=jnp.zeros([], jnp.float32),
        )

    return optax.GradientTransformation(init_fn, update_fn)


def _scaled(g: Array, factor: Array) -> Array:
    # A 16-bit factor may be zero where the product is not.
    dtype = g.dtype if jnp.finfo(g.dtype).bits > 32 else jnp.float32
    return (g.astype(dtype) * factor.astype(dtype)).astype(g.dtype)
