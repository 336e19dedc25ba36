"""The state of 1-bit LAMB, which tells its own stages and measures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import optax

from onebit_jax.optimizers.parts.error_norms import error_norms
from onebit_jax.optimizers.parts.layers import times

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32, Int32


class ScaleByOnebitLambState(NamedTuple):
    """State of `scale_by_onebit_lamb`, the same on all workers but for the exchange.

    Numbers of layers are in the order of the parameters' leaves.

    Attributes:
      count: number of steps taken.
      mu: momentum, float32.
      nu: variance, float32, without bias correction; frozen once `frozen_at` is set.
      nu_fresh: variance that goes on after the freeze, from gradients that are
        restored from momenta; zero before.
      frozen_at: number of warm-up steps taken when the variance was frozen; 0 as
        long as it is not.
      late: number of steps of the stage 'warmup' taken after the freeze.
      ratio: (layers,) running mean, from zero, of each layer's ratio of norms in the
        warm-up.
      ratio_weight: (layers,) weight of all ratios so far in that mean.
      factor: (layers,) on the frozen ratio in the last step; 1 before the freeze.
      magnitude: (layers,) factors of momenta that are exchanged; 1 before the freeze.
      floored: share of the frozen variances that the floor raised.
      bounded: share of updates that were cut to the bound in the last step; 0 before
        the freeze.
      freeze: state of the freeze rule.
      decay: state of the weight decay.
      exchange: state of the exchange.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: optax.Params
    nu: optax.Params
    nu_fresh: optax.Params
    frozen_at: Int32[Array, ""]
    late: Int32[Array, ""]
    ratio: Float32[Array, " layers"]
    ratio_weight: Float32[Array, " layers"]
    factor: Float32[Array, " layers"]
    magnitude: Float32[Array, " layers"]
    floored: Float32[Array, ""]
    bounded: Float32[Array, ""]
    freeze: Any
    decay: Any
    exchange: Any

    def steps_by_stage(self) -> dict[str, Array]:
        """Steps taken in each stage; see `onebit_jax.steps_by_stage`."""
        until = jnp.where(self.frozen_at > 0, self.frozen_at, self.count)
        warmup = until + self.late
        return {"warmup": warmup, "compressed": self.count - warmup}

    def metrics(self) -> dict[str, Array]:
        """Measures of the optimizer; see `onebit_jax.metrics`.

        Returns:
          Those of 1-bit Adam, its errors beside momenta brought to one magnitude and
          `bounded_share` of the last step; and `largest_factor`, the largest factor on
          a layer's frozen ratio.
        """
        return {
            "count": self.count,
            "compressed": (self.frozen_at > 0).astype(jnp.int32),
            "frozen_at": self.frozen_at,
            "floored_share": self.floored,
            "bounded_share": self.bounded,
            "largest_factor": jnp.max(self.factor, initial=0.0),
            **error_norms(self.exchange, times(self.magnitude, self.mu)),
        }
