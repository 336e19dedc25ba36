"""0/1 Adam: a variance refreshed at intervals, one bit a value, local steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import optax

from onebit_jax.optimizers.parts.bound import cut
from onebit_jax.optimizers.parts.freeze import asks_to_freeze
from onebit_jax.optimizers.parts.moments import weight
from onebit_jax.optimizers.parts.own_moments import as_own, own_moments, zero_moments
from onebit_jax.optimizers.zero_one_adam_state import ZeroOneAdamState
from onebit_jax.workers.axes import bound_workers, to_varying
from onebit_jax.workers.stages import run_stage
from onebit_jax.workers.worker_local import WorkerLocal

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Bool, Int32

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.optimizers.parts.floor import FloorAtMean
    from onebit_jax.optimizers.parts.freeze import FreezeRule
    from onebit_jax.optimizers.parts.intervals import IntervalRule

_NAME = "0/1 Adam"

BeforeFreeze = Literal["momentum", "gradient"]
Decay = Literal["agreed", "accumulated"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroOneAdam:
    """The transformation of `zero_one_adam`, by the names of its arguments."""

    learning_rate: optax.ScalarOrSchedule
    exchange: Exchange
    freeze: FreezeRule
    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    refresh: IntervalRule
    variance_exchange: Exchange
    sync: IntervalRule
    before_freeze: BeforeFreeze
    decay: Decay
    weight_decay: optax.GradientTransformation
    bias_correction: bool
    floor: FloorAtMean | None
    bound: ArrayLike | None

    def init(self, params: optax.Params) -> ZeroOneAdamState:
        """The state before any gradient."""

        def zeros() -> optax.Params:
            return optax.tree.zeros_like(params, dtype=jnp.float32)

        def own() -> WorkerLocal:
            return zero_moments(params, self.exchange.axes, _NAME)

        def zero() -> Array:
            return jnp.zeros([], jnp.int32)

        # Each anew: a buffer that is in a state twice cannot be donated.
        return ZeroOneAdamState(
            count=zero(),
            mu=zeros() if self.before_freeze == "gradient" else None,
            own_mu=own(),
            nu=zeros(),
            refreshed=zero(),
            moved=own(),
            rates=jnp.zeros([], jnp.float32),
            frozen_at=zero(),
            floored=jnp.zeros([], jnp.float32),
            taken={name: zero() for name in self.stages()},
            freeze=self.freeze.init(),
            refresh=self.refresh.init(),
            sync=self.sync.init(),
            decay=self.weight_decay.init(params),
            exchange=self.exchange.init(params),
            variance_exchange=self.variance_exchange.init(params),
        )

    def stages(self) -> dict[str, Callable[..., Any]]:
        """Functions by stage.

        Until the freeze one of the first two runs, after it one of the last two;
        'compressed' may be in both.
        """
        if self.before_freeze == "momentum":
            return {
                "variance": self.refresh_and_synchronise,
                "compressed": self.synchronise,
                "local": self.step_alone,
            }
        return {
            "variance": self.refresh_both,
            "gradient": self.exchange_gradients,
            "compressed": self.synchronise,
            "local": self.step_alone,
        }

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        stage: str | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, Any]:
        """The updates of the agreed parameters, and the new state."""
        del extra_args
        if params is None:
            raise ValueError("0/1 Adam needs the parameters: give them to update.")
        bound_workers(self.exchange.axes)
        frozen = state.frozen_at > 0
        count = jnp.asarray(optax.safe_increment(state.count))
        refreshes, refresh = self.refresh.update(state.refresh, count)
        syncs, sync = self.sync.update(state.sync, count)
        # Until the freeze the rule for refreshing counts, after it that for syncing.
        state = state._replace(
            count=count,
            refresh=optax.tree.where(frozen, state.refresh, refresh),
            sync=optax.tree.where(frozen, sync, state.sync),
        )
        gradients = optax.tree.cast(updates, jnp.float32)
        params = optax.tree.cast(params, jnp.float32)
        run = {
            name: functools.partial(function, gradients, state, params)
            for name, function in self.stages().items()
        }
        # The first step always refreshes: it has no variance to divide by yet.
        refreshes |= (state.refreshed == 0) | self.exchange.is_alone()
        until, after = jnp.where(refreshes, 0, 1), jnp.where(syncs, 2, 1)
        index = jnp.where(frozen, len(run) - after, until)
        new_updates, state = run_stage(run, index, stage)
        if stage is not None:
            index = list(run).index(stage)
        taken = {
            name: state.taken[name] + jnp.asarray(i == index, jnp.int32)
            for i, name in enumerate(run)
        }
        if self.decay == "agreed":
            rate = self.rate(count - 1)
            zeros = optax.tree.zeros_like(new_updates)
            decay, state = self.decayed(zeros, state, params)
            new_updates = jax.tree.map(lambda u, d: u - rate * d, new_updates, decay)
        state = state._replace(taken=taken)
        # Workers step alone after the freeze only.
        if stage != "local":
            state = jax.lax.cond(
                frozen,
                lambda: state,
                lambda: self.at_freeze(state, jnp.asarray(index == 0)),
            )
        return optax.tree.cast_like(new_updates, updates), state

    def refresh_both(
        self, gradients: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """The variance and the momentum with the mean of the gradients."""
        return self.agreed_step(*self.refresh_variance(gradients, state), params)

    def refresh_and_synchronise(
        self, gradients: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """The variance with the mean of the gradients, the momentum by its exchange."""
        _, state = self.refresh_variance(gradients, state)
        return self.synchronise(gradients, state, params)

    def exchange_gradients(
        self, gradients: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """The momentum with the gradients that the exchange agrees on."""
        mean, exchange = self.exchange.update(gradients, state.exchange)
        return self.agreed_step(mean, state._replace(exchange=exchange), params)

    def step_alone(
        self, gradients: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """A step of each worker's own, which the agreed parameters do not take."""
        state = self.step_own(gradients, state, params)
        return optax.tree.zeros_like(state.nu), state

    def synchronise(
        self, gradients: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """A step of each worker's own, and an exchange of all since the last one."""
        # Where few workers have a gradient, their momenta are large beside the root of
        # the mean's variance. With n times the bound no worker alone moves the mean by
        # more than the bound, and what the few agree on is kept.
        workers = bound_workers(self.exchange.axes)
        state = self.step_own(gradients, state, params, times_bound=workers)
        roots = self.roots(state)
        sums = jax.tree.map(lambda d, root: d[0] * root, state.moved.value, roots)
        agreed, exchange = self.exchange.update(sums, state.exchange)
        # The mean momentum of the steps, weighted by their learning rates; there is
        # none where all of these are zero.
        some = state.rates > 0
        mu = _scaled(-1 / jnp.where(some, state.rates, 1), agreed)
        return _scaled(-state.rates, self.direction(mu, roots)), state._replace(
            own_mu=optax.tree.where(some, self.own(mu), state.own_mu),
            moved=self.own(optax.tree.zeros_like(mu)),
            rates=jnp.zeros([], jnp.float32),
            # At a learning rate of zero no parameter moves, so the exchange's errors
            # stay as they were.
            exchange=optax.tree.where(some, exchange, state.exchange),
        )

    def step_own(
        self,
        gradients: optax.Updates,
        state: ZeroOneAdamState,
        params: Any,
        times_bound: int = 1,
    ) -> ZeroOneAdamState:
        """The state after each worker's own step, cut to a multiple of the bound."""
        before, moved = (
            own_moments(node, gradients, self.exchange.axes, _NAME)
            for node in (state.own_mu, state.moved)
        )
        mu = optax.tree.update_moment(gradients, before, self.b1, 1)
        direction = self.direction(mu, self.roots(state), times_bound)
        if self.decay == "accumulated":
            own_params = state.local_params(params)
            direction, state = self.decayed(direction, state, own_params)
        rate = self.corrected_rate(state.count)
        moved = jax.tree.map(lambda d, u: d - rate * u, moved, direction)
        return state._replace(
            own_mu=self.own(mu), moved=self.own(moved), rates=state.rates + rate
        )

    def agreed_step(
        self, mean: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """A step that all workers take, with an agreed gradient."""
        mu = optax.tree.update_moment(mean, state.mu, self.b1, 1)
        direction = self.direction(mu, self.roots(state))
        if self.decay == "accumulated":
            direction, state = self.decayed(direction, state, params)
        rate = self.corrected_rate(state.count)
        return _scaled(-rate, direction), state._replace(mu=mu)

    def refresh_variance(
        self, gradients: optax.Updates, state: ZeroOneAdamState
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """The mean of the gradients, and the state with it in the variance.

        After the freeze, where a program of one stage may run on, the variance stays.
        """
        mean, exchanged = self.variance_exchange.update(
            gradients, state.variance_exchange
        )
        nu = optax.tree.update_moment_per_elem_norm(mean, state.nu, self.b2, 2)
        frozen = state.frozen_at > 0
        return mean, state._replace(
            nu=optax.tree.where(frozen, state.nu, nu),
            refreshed=jnp.where(frozen, state.refreshed, state.refreshed + 1),
            variance_exchange=exchanged,
        )

    def at_freeze(
        self, state: ZeroOneAdamState, has_refreshed: Bool[Array, ""]
    ) -> ZeroOneAdamState:
        """The state with the variance frozen, if the rule fires now."""
        norm = optax.tree.sum(state.nu) / self.variance_weight(state)
        now, rule = asks_to_freeze(
            self.freeze, state.freeze, state.count, norm, self.exchange
        )
        if self.freeze.by_norm:
            # Without a refresh the norm is unchanged, and the rule would fire.
            now &= has_refreshed
        raised, floored = state.nu, 0.0
        if self.floor is not None:
            raised, floored = self.floor.apply(state.nu)
        own, exchange = state.own_mu.value, state.exchange
        if state.mu is not None:
            own = optax.tree.where(now, self.own(state.mu).value, own)
            # From now on momenta are exchanged, and these errors are of gradients.
            exchange = jax.tree.map(lambda e: jnp.where(now, 0, e), exchange)
        return state._replace(
            own_mu=dataclasses.replace(state.own_mu, value=own),
            nu=optax.tree.where(now, raised, state.nu),
            frozen_at=jnp.where(now, state.count, state.frozen_at),
            floored=jnp.where(now, floored, state.floored),
            freeze=rule,
            exchange=exchange,
        )

    def direction(
        self, mu: optax.Params, roots: optax.Params, times_bound: int = 1
    ) -> optax.Updates:
        """Momenta over the roots of the variance, cut to a multiple of the bound."""
        bound = None if self.bound is None else times_bound * self.bound
        return cut(jax.tree.map(jnp.divide, mu, roots), bound)

    def decayed(
        self, direction: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """A direction plus the decay of parameters, agreed ones or a worker's own."""
        direction, decay = self.weight_decay.update(direction, state.decay, params)
        return direction, state._replace(decay=decay)

    def roots(self, state: ZeroOneAdamState) -> optax.Params:
        """The roots of the variance, plus eps."""
        divisor = self.variance_weight(state)
        return jax.tree.map(lambda v: jnp.sqrt(v / divisor) + self.eps, state.nu)

    def corrected_rate(self, count: Int32[Array, ""]) -> Array:
        """The learning rate of a step over the weight of its momentum."""
        return self.rate(count - 1) / self.weight(self.b1, count)

    def rate(self, count: Int32[Array, ""]) -> Array:
        """The learning rate after so many steps."""
        rate: Any = self.learning_rate
        return jnp.asarray(rate(count) if callable(rate) else rate, jnp.float32)

    def weight(self, decay: ArrayLike, steps: Int32[Array, ""]) -> Array:
        """The weight of so many values in a running mean; 1 without bias correction."""
        return weight(decay, steps) if self.bias_correction else jnp.float32(1)

    def variance_weight(self, state: ZeroOneAdamState) -> Array:
        """The weight of all refreshes so far, or of one before the first."""
        return self.weight(self.b2, jnp.maximum(state.refreshed, 1))

    def own(self, tree: Any) -> WorkerLocal:
        """A tree as worker-local state, whether or not workers agree on it."""
        return as_own(to_varying(tree, self.exchange.axes), self.exchange.axes)


def _scaled(factor: Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: factor * x, tree)
