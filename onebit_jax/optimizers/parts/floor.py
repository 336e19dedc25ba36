"""A floor for variances at the freeze."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    import optax
    from jax import Array
    from jaxtyping import Float32


@dataclasses.dataclass(frozen=True)
class FloorAtMean:
    """Raises negligible variances to their leaf's mean when they are frozen.

    A sign cannot say zero: a coordinate whose frozen variance is zero, because it had
    no gradient yet, would move by its scale / eps.

    Attributes:
      negligible: variances below this share of their leaf's mean are raised.

    Raises:
      ValueError: if the share is not from 0 to below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> raised, share = FloorAtMean().apply(jnp.array([0.0, 2.0]))
      >>> print(raised, share)
      [1. 2.] 0.5
    """

    negligible: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 <= self.negligible < 1:
            raise ValueError(
                f"negligible must be a share from 0 to below 1, got {self.negligible}."
            )

    def apply(self, nu: optax.Params) -> tuple[optax.Params, Float32[Array, ""]]:
        """The variances with the negligible ones raised.

        Args:
          nu: variances.

        Returns:
          The variances, and the share of them that was raised.
        """
        means = jax.tree.map(lambda v: jnp.sum(v) / float(max(v.size, 1)), nu)
        low = jax.tree.map(lambda v, mean: v < self.negligible * mean, nu, means)
        raised = jax.tree.map(
            lambda v, is_low, mean: jnp.where(is_low, mean, v), nu, low, means
        )
        size = max(sum(v.size for v in jax.tree.leaves(nu)), 1)
        number = sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(low))
        return raised, jnp.asarray(number / float(size), jnp.float32)
