"""The stages of 1-bit Adam: Adam, steps between two refreshes, compressed steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.optimizers.onebit_adam_state import (
    RefreshState,
    ScaleByOnebitAdamState,
)
from onebit_jax.optimizers.parts.bound import cut, share_beyond
from onebit_jax.optimizers.parts.freeze import asks_to_freeze
from onebit_jax.optimizers.parts.moments import divide_by_weight, extrapolate, weight
from onebit_jax.workers.arithmetic import zero_after
from onebit_jax.workers.axes import bound_workers
from onebit_jax.workers.stages import run_stage

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Int32

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.optimizers.parts.floor import FloorAtMean
    from onebit_jax.optimizers.parts.freeze import FreezeRule
    from onebit_jax.optimizers.parts.growth import GrowthByMeanSquares, GrowthState
    from onebit_jax.optimizers.parts.intervals import IntervalRule

Send = Literal["gradient", "momentum"]

_BOUNDED_EVERY = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnebitAdam:
    """The transformation of `scale_by_onebit_adam`, by the names of its arguments."""

    exchange: Exchange
    warmup_exchange: Exchange
    freeze: FreezeRule
    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    bias_correction: bool
    refresh: IntervalRule | None
    send: Send
    lead: ArrayLike | None
    growth: GrowthByMeanSquares | None
    floor: FloorAtMean | None
    bound: ArrayLike | None

    def init(self, params: optax.Params) -> ScaleByOnebitAdamState:
        """The state before any gradient."""
        return ScaleByOnebitAdamState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=jnp.float32),
            nu=optax.tree.zeros_like(params, dtype=jnp.float32),
            frozen_at=jnp.zeros([], jnp.int32),
            late=jnp.zeros([], jnp.int32),
            floored=jnp.zeros([], jnp.float32),
            bounded=jnp.zeros([], jnp.float32),
            freeze=self.freeze.init(),
            refresh=self.refresh
            and RefreshState(
                self.refresh.init(), jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)
            ),
            growth=self.growth and self.growth.init(params),
            exchange=self.exchange.init(params),
            warmup=self.warmup_exchange.init(params),
        )

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        stage: str | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, Any]:
        """The rescaled updates, and the new state."""
        del params, extra_args
        bound_workers(self.exchange.axes)
        count = jnp.asarray(optax.safe_increment(state.count))
        frozen = state.frozen_at > 0
        index = frozen.astype(jnp.int32)
        stages = {
            "warmup": lambda: self.warmup(updates, state, count, stage == "warmup"),
            "between": lambda: self.between(updates, state, count),
            "compressed": lambda: self.compressed(updates, state, count),
        }
        if self.refresh is None or state.refresh is None:
            del stages["between"]
        else:
            due, rule = self.refresh.update(state.refresh.rule, count)
            state = state._replace(refresh=state.refresh._replace(rule=rule))
            # The first step always refreshes: it has no variance to divide by yet.
            due |= (state.refresh.times == 0) | self.exchange.is_alone()
            index = jnp.where(frozen, 2, jnp.where(due, 0, 1))
        new_updates, state = run_stage(stages, index, stage)
        return optax.tree.cast_like(new_updates, updates), state._replace(count=count)

    def warmup(
        self,
        gradients: optax.Updates,
        state: ScaleByOnebitAdamState,
        count: Int32[Array, ""],
        alone: bool,
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        """Adam on the mean of the gradients, until the freeze rule fires."""
        mean, exchanged = self.warmup_exchange.update(gradients, state.warmup)
        mean = optax.tree.cast(mean, jnp.float32)
        mu = optax.tree.update_moment(mean, state.mu, self.b1, 1)
        state = state._replace(mu=mu, warmup=exchanged)
        if not alone:
            return self.adam(mean, state, count)
        # A program of this stage alone may run on after the freeze.
        return lax.cond(
            state.frozen_at > 0,
            lambda: self.frozen_adam(mean, state, count),
            lambda: self.adam(mean, state, count),
        )

    def adam(
        self,
        mean: optax.Updates,
        state: ScaleByOnebitAdamState,
        count: Int32[Array, ""],
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        """A step of Adam by the new momentum, and the freeze if the rule fires."""
        decay, refresh = self.b2, state.refresh
        if refresh is not None:
            # Before the first refresh it may be Adam's, which refreshed in every step.
            last = jnp.where(refresh.times == 0, count - 1, refresh.last)
            decay = self.b2 ** (count - last).astype(jnp.float32)
            times = jnp.where(refresh.times == 0, count, refresh.times + 1)
            refresh = refresh._replace(times=times, last=count)
        nu = optax.tree.update_moment_per_elem_norm(mean, state.nu, decay, 2)
        norm = self.corrected(optax.tree.sum(nu), self.b2, count)
        now, rule = asks_to_freeze(
            self.freeze, state.freeze, count, norm, self.exchange
        )
        growth = state.growth
        if self.growth is not None and growth is not None:
            freeze = functools.partial(self.growth.freeze, nu)
            growth = lax.cond(now, freeze, lambda growth: growth, growth)
        raised, floored = nu, 0.0
        if self.floor is not None:
            raised, floored = self.floor.apply(nu)
        # Floor and bound begin after this step, which is still Adam's. But with steps
        # between refreshes, signs have already moved coordinates without a variance.
        signs = refresh is not None
        direction = self.corrected(state.mu, self.b1, count)
        new_updates = self.ratio(direction, raised if signs else nu, count)
        return cut(new_updates, self.bound if signs else None), state._replace(
            nu=optax.tree.where(now, raised, nu),
            frozen_at=jnp.where(now, count, 0),
            floored=jnp.where(now, floored, state.floored),
            freeze=rule,
            refresh=refresh,
            growth=growth,
        )

    def frozen_adam(
        self,
        mean: optax.Updates,
        state: ScaleByOnebitAdamState,
        count: Int32[Array, ""],
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        """A step by the momentum of the warm-up's exchange and the frozen variance."""
        growth = state.growth
        if self.growth is not None and growth is not None:
            growth = self.growth.follow_mean(mean, growth, self.b2)
        state = state._replace(late=state.late + 1, growth=growth)
        direction = self.corrected(state.mu, self.b1, count)
        new_updates = self.ratio(direction, self.grown(state), self.learnt_in(state))
        return cut(new_updates, self.bound), state

    def between(
        self,
        gradients: optax.Updates,
        state: ScaleByOnebitAdamState,
        count: Int32[Array, ""],
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        """A step by the exchanged momentum and the variance as last refreshed."""
        mu, exchanged = self.agreed(gradients, state)
        nu = state.nu if self.floor is None else self.floor.apply(state.nu)[0]
        direction = self.led(mu, state.mu, count)
        new_updates = self.ratio(direction, nu, self.learnt_in(state))
        return cut(new_updates, self.bound), state._replace(mu=mu, exchange=exchanged)

    def compressed(
        self,
        gradients: optax.Updates,
        state: ScaleByOnebitAdamState,
        count: Int32[Array, ""],
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        """A step by the exchanged momentum and the frozen variance."""
        frozen = state.frozen_at > 0
        frozen_at = jnp.where(frozen, state.frozen_at, jnp.maximum(state.count, 1))
        mu, exchanged = self.agreed(gradients, state)
        growth = state.growth
        if self.growth is not None and growth is not None:
            growth = self.growth.follow(
                gradients,
                self.frozen_growth(self.growth, state, growth),
                decay=self.b2,
                count=count + zero_after(mu),
                axes=self.exchange.axes,
            )
        state = state._replace(frozen_at=frozen_at, growth=growth)

        def unbounded() -> optax.Updates:
            direction = self.led(mu, state.mu, count)
            return self.ratio(direction, self.grown(state), self.learnt_in(state))

        # Computes the updates once more, as sharing them would write them to memory.
        bounded = lax.cond(
            count % _BOUNDED_EVERY == 0,
            lambda: share_beyond(unbounded(), self.bound),
            lambda: state.bounded,
        )
        return cut(unbounded(), self.bound), state._replace(
            mu=mu, bounded=bounded, exchange=exchanged
        )

    def frozen_growth(
        self,
        rule: GrowthByMeanSquares,
        state: ScaleByOnebitAdamState,
        growth: GrowthState,
    ) -> GrowthState:
        """The growth, from the variance if this step is the one that freezes it."""
        return lax.cond(
            state.frozen_at > 0,
            lambda: growth,
            # The state may be of plain Adam, which does not follow the growth.
            lambda: rule.freeze(state.nu, growth),
        )

    def learnt_in(self, state: ScaleByOnebitAdamState) -> Int32[Array, ""]:
        """The number of steps whose gradients the variance has learnt from."""
        taken = jnp.where(state.frozen_at > 0, state.frozen_at, state.count)
        if state.refresh is not None:
            # Before the first refresh it is Adam's, which refreshed in every step.
            taken = jnp.where(state.refresh.times == 0, taken, state.refresh.last)
        return jnp.maximum(taken, 1)

    def agreed(
        self, gradients: optax.Updates, state: ScaleByOnebitAdamState
    ) -> tuple[optax.Params, Any]:
        """The new momentum by the exchange, and the exchange's new state."""
        if self.send == "momentum":
            return self.exchange.exchange_momentum(
                gradients, state.mu, self.b1, state.exchange
            )
        gradients = optax.tree.cast(gradients, jnp.float32)
        mean, exchanged = self.exchange.update(gradients, state.exchange)
        return optax.tree.update_moment(mean, state.mu, self.b1, 1), exchanged

    def corrected(
        self, moment: optax.Params, decay: ArrayLike, steps: Int32[Array, ""]
    ) -> optax.Params:
        """A moment corrected for its start from zero, if bias correction is on."""
        if not self.bias_correction:
            return moment
        return divide_by_weight(moment, decay, steps)

    def led(
        self, mu: optax.Params, last: optax.Params, count: Int32[Array, ""]
    ) -> optax.Params:
        """The corrected momentum, extrapolated by the lead."""
        now = self.corrected(mu, self.b1, count)
        if self.lead is None:
            return now
        # Corrected before they are compared: a rise from zero is no lag.
        before = self.corrected(last, self.b1, jnp.maximum(count - 1, 1))
        steps = jnp.where(count > 1, self.lead, 0.0)
        return extrapolate(now, before, steps)

    def ratio(
        self, mu: optax.Params, nu: optax.Params, steps: Int32[Array, ""]
    ) -> optax.Updates:
        """A corrected momentum over the root of a variance from so many steps."""
        nu = self.corrected(nu, self.b2, steps)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + self.eps), mu, nu)

    def grown(self, state: ScaleByOnebitAdamState) -> optax.Params:
        """The frozen variances with their growth so far."""
        if self.growth is None or state.growth is None:
            return state.nu
        measured = self.growth.period * state.growth.measured
        until = self.learnt_in(state)
        now, frozen = (
            weight(self.b2, steps) if self.bias_correction else 1
            for steps in (until + state.late + measured, until)
        )
        return self.growth.grow(
            state.nu, state.growth, weight_now=now, weight_frozen=frozen
        )
