"""The state of 0/1 Adam, which tells its stages, its measures, its workers' own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from onebit_jax.workers.worker_local import WorkerLocal, add_own

if TYPE_CHECKING:
    import optax
    from jax import Array
    from jaxtyping import Float32, Int32


STAGES = "variance", "gradient", "compressed", "local"


class ZeroOneAdamState(NamedTuple):
    """State of `zero_one_adam`.

    Attributes:
      count: number of steps taken.
      mu: the agreed momentum until the freeze, float32, where gradients are exchanged
        until then; else None.
      own_mu: each worker's momentum, `(workers, *shape)` of each leaf, float32.
      nu: variance, float32, without bias correction.
      refreshed: how often it was refreshed.
      moved: by how much each worker's parameters differ from the agreed ones,
        `(workers, *shape)` of each leaf, float32; zero after a synchronisation.
      rates: sum of the learning rates since the last synchronisation, each over the
        weight of its momentum.
      frozen_at: number of steps taken when the variance was frozen; 0 as long as it
        is not.
      floored: share of the frozen variances that the floor raised.
      taken: steps by stage.
      freeze: state of the freeze rule.
      refresh: state of the rule for refreshing.
      sync: state of the rule for synchronising.
      decay: state of the weight decay.
      exchange: state of the exchange.
      variance_exchange: state of the exchange that refreshes the variance.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: optax.Params | None
    own_mu: WorkerLocal
    nu: optax.Params
    refreshed: Int32[Array, ""]
    moved: WorkerLocal
    rates: Float32[Array, ""]
    frozen_at: Int32[Array, ""]
    floored: Float32[Array, ""]
    taken: dict[str, Int32[Array, ""]]
    freeze: Any
    refresh: Any
    sync: Any
    decay: Any
    exchange: Any
    variance_exchange: Any

    def local_params(self, params: optax.Params) -> optax.Params:
        """See `onebit_jax.local_params`."""
        return add_own(params, self.moved)

    def steps_by_stage(self) -> dict[str, Array]:
        """Steps taken in each stage; see `onebit_jax.steps_by_stage`."""
        # A tree's dictionaries are in the order of their keys.
        return {name: self.taken[name] for name in STAGES if name in self.taken}

    def metrics(self) -> dict[str, Array]:
        """Measures of the optimizer; see `onebit_jax.metrics`.

        Returns:
          `count`, steps taken; `compressed`, 1 once the variance is frozen;
          `frozen_at`, the steps taken by then; `floored_share`, frozen variances that
          the floor raised; `refreshed`, how often the variance was refreshed;
          `synchronised`, steps that exchanged.
        """
        return {
            "count": self.count,
            "compressed": (self.frozen_at > 0).astype(jnp.int32),
            "frozen_at": self.frozen_at,
            "floored_share": self.floored,
            "refreshed": self.refreshed,
            "synchronised": self.count - self.taken["local"],
        }
