"""Growth by the exact mean gradient: for the ablation alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

import onebit_jax

if TYPE_CHECKING:
    import optax
    from jax.typing import ArrayLike


class GrowthByExactMeanSquares(onebit_jax.GrowthByMeanSquares):
    """`GrowthByMeanSquares` without random sums, whose mean gradient is exchanged.

    No optimizer to use, but the most that rows and columns could gain.
    """

    def follow(
        self,
        gradients: optax.Updates,
        state: Any,
        *,
        decay: ArrayLike,
        count: Any,
        axes: tuple[str, ...],
    ) -> Any:
        """Adds gradients, which are exchanged exactly."""
        del count
        mean = jax.tree.map(lambda g: lax.pmean(g.astype(jnp.float32), axes), gradients)
        state = self.follow_mean(mean, state, decay**self.period)
        return state._replace(measured=state.measured + 1)
