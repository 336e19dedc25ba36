"""Skipping steps whose gradients are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.transforms.branch import no_update
from onebit_jax.workers.arithmetic import squared_norm
from onebit_jax.workers.axes import (
    AxisNames,
    as_tuple,
    bound_workers,
    check_all_axes,
)
from onebit_jax.workers.states import optimizer_state

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Int32


@optimizer_state
class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`.

    Attributes:
      skipped: number of steps skipped so far.
      inner: state of the wrapped transformation.
    """

    skipped: Int32[Array, ""]
    inner: Any

    wrapper = "skip_nonfinite"

    def metrics(self) -> dict[str, Array]:
        """The number of steps skipped; see `onebit_jax.metrics`."""
        return {"skipped": self.skipped}


def skip_nonfinite(
    tx: optax.GradientTransformation, axis: AxisNames
) -> optax.GradientTransformationExtraArgs:
    r"""Skips a step, on all workers, if any worker's gradients are not finite.

    Nothing changes in a skipped step: the updates are zero, and momentum, errors and
    counts stay as they were. A step is skipped if the sum over workers of
    :math:`\|g^{(i)}\|_2^2`, in float32, is not finite. So gradients whose squares
    overflow, which would leave Adam an infinite variance, are skipped too. What the
    loss function returns beside the loss (`has_aux`), such as running statistics, is
    not undone: keep the old ones where the new ones are not finite.

    `optax.apply_if_finite` cannot be used around an exchange: it decides on each
    worker by itself, and workers that disagree wait for each other for ever.

    Args:
      tx: the transformation, collectives included.
      axis: name, or names, of the mesh axes whose members are the workers.

    Returns:
      A transformation whose state counts the steps skipped.

    Raises:
      ValueError: from `update`, if gradients differ over further axes than these, or an
        axis is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> tx = skip_nonfinite(onebit_jax.exact_mean('data'), 'data')
      >>> def update(g):
      ...     updates, state = tx.update(g, tx.init(g))
      ...     return updates, state.skipped
      >>> updates, skipped = jax.vmap(update, axis_name='data')(
      ...     jnp.array([[1.0, 2.0], [3.0, jnp.nan]]))
      >>> print(updates[0], skipped[0])
      [-0. -0.] 1
    """
    axes = as_tuple(axis)
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: optax.Params) -> SkipNonfiniteState:
        return SkipNonfiniteState(jnp.zeros([], jnp.int32), inner.init(params))

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        bound_workers(axes)
        check_all_axes(updates, axes, "skip_nonfinite")
        finite = jnp.isfinite(lax.psum(squared_norm(updates), axes))

        @jax.jit  # traced once, for `no_update` and for the branch
        def take() -> tuple[optax.Updates, Any]:
            return inner.update(updates, state.inner, params, **extra_args)

        def skip() -> tuple[optax.Updates, Any]:
            return no_update(take), state.inner

        new_updates, inner_state = lax.cond(finite, take, skip)
        skipped = jnp.where(finite, state.skipped, optax.safe_increment(state.skipped))
        return new_updates, SkipNonfiniteState(skipped, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
