"""The state of 1-bit Adam, which tells its own stages and measures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import optax

from onebit_jax.optimizers.parts.error_norms import error_norms

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32, Int32

    from onebit_jax.optimizers.parts.growth import GrowthState


class RefreshState(NamedTuple):
    """State of a variance that is refreshed at intervals until the freeze.

    Attributes:
      rule: state of the rule of intervals.
      times: how often the variance was refreshed.
      last: number of steps taken when it last was.
    """

    rule: Any
    times: Int32[Array, ""]
    last: Int32[Array, ""]


class ScaleByOnebitAdamState(NamedTuple):
    """State of `scale_by_onebit_adam`.

    Attributes:
      count: number of steps taken.
      mu: momentum, float32, the same on all workers.
      nu: variance, float32, without bias correction; frozen once `frozen_at` is set.
      frozen_at: number of steps taken when the variance was frozen; 0 as long as it
        is not.
      late: number of steps of the stage 'warmup' taken after the freeze.
      floored: share of the frozen variances that the floor raised.
      bounded: share of updates that were cut to the bound in the last compressed step
        whose number is a multiple of 8.
      freeze: state of the freeze rule.
      refresh: state of the variance's refreshes; None if every step of the warm-up
        refreshes it.
      growth: state of the growth; None without it.
      exchange: state of the exchange.
      warmup: state of the warm-up's own exchange.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: optax.Params
    nu: optax.Params
    frozen_at: Int32[Array, ""]
    late: Int32[Array, ""]
    floored: Float32[Array, ""]
    bounded: Float32[Array, ""]
    freeze: Any
    refresh: RefreshState | None
    growth: GrowthState | None
    exchange: Any
    warmup: Any

    def steps_by_stage(self) -> dict[str, Array]:
        """Steps taken in each stage; see `onebit_jax.steps_by_stage`."""
        until = jnp.where(self.frozen_at > 0, self.frozen_at, self.count)
        stages = {"warmup": until + self.late}
        if self.refresh is not None:
            # All steps so far are Adam's where its state was put in.
            times = jnp.where(self.refresh.times == 0, until, self.refresh.times)
            stages = {"warmup": times + self.late, "between": until - times}
        after = self.count - until - self.late
        if self.growth is None:
            return {**stages, "compressed": after}
        # Order matters: the training log names the last stage that has new steps.
        measured = self.growth.measured
        return {
            **stages,
            "compressed/measuring": measured,
            "compressed": after - measured,
        }

    def metrics(self) -> dict[str, Array]:
        """Measures of the optimizer; see `onebit_jax.metrics`.

        Returns:
          `count`, steps taken; `compressed`, 1 once the variance is frozen;
          `frozen_at`, the steps taken by then; `floored_share`, frozen variances that
          the floor raised; `bounded_share`, updates cut to the bound, when last
          measured; `worker_error` and `server_error`, as in `error_norms`.
        """
        return {
            "count": self.count,
            "compressed": (self.frozen_at > 0).astype(jnp.int32),
            "frozen_at": self.frozen_at,
            "floored_share": self.floored,
            "bounded_share": self.bounded,
            **error_norms(self.exchange, self.mu),
        }
