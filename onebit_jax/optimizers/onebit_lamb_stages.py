"""The stages of 1-bit LAMB: LAMB, then compressed steps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.exchanges.exchange import exact_mean
from onebit_jax.optimizers.onebit_lamb_state import ScaleByOnebitLambState
from onebit_jax.optimizers.parts.bound import cut, share_beyond
from onebit_jax.optimizers.parts.floor import FloorAtMean
from onebit_jax.optimizers.parts.freeze import asks_to_freeze
from onebit_jax.optimizers.parts.layers import (
    equal_magnitudes,
    exchange_scaled_momentum,
    times,
)
from onebit_jax.optimizers.parts.moments import divide_by_weight
from onebit_jax.optimizers.parts.trust_ratio import next_factor, trust_ratio
from onebit_jax.workers.axes import bound_workers
from onebit_jax.workers.stages import run_stage

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32, Int32

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.optimizers.parts.freeze import FreezeRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnebitLamb:
    """The transformation of `scale_by_onebit_lamb`, by the names of its arguments."""

    exchange: Exchange
    freeze: FreezeRule
    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    weight_decay: optax.GradientTransformation
    bias_correction: bool
    ratio_limits: tuple[float, float]
    ratio_decay: ArrayLike
    factor_limits: tuple[float, float]
    factor_change: ArrayLike
    floor: FloorAtMean | None
    bound: ArrayLike | None

    def init(self, params: optax.Params) -> ScaleByOnebitLambState:
        """The state before any gradient."""
        layers = len(jax.tree.leaves(params))
        return ScaleByOnebitLambState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=jnp.float32),
            nu=optax.tree.zeros_like(params, dtype=jnp.float32),
            nu_fresh=optax.tree.zeros_like(params, dtype=jnp.float32),
            frozen_at=jnp.zeros([], jnp.int32),
            late=jnp.zeros([], jnp.int32),
            ratio=jnp.zeros(layers, jnp.float32),
            ratio_weight=jnp.zeros(layers, jnp.float32),
            factor=jnp.ones(layers, jnp.float32),
            magnitude=jnp.ones(layers, jnp.float32),
            floored=jnp.zeros([], jnp.float32),
            bounded=jnp.zeros([], jnp.float32),
            freeze=self.freeze.init(),
            decay=self.weight_decay.init(params),
            exchange=self.exchange.init(params),
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
        del extra_args
        if params is None:
            raise ValueError("1-bit LAMB needs the parameters: give them to update.")
        bound_workers(self.exchange.axes)
        values = optax.tree.cast(params, jnp.float32)
        count = jnp.asarray(optax.safe_increment(state.count))
        alone = stage == "warmup"
        stages = {
            "warmup": lambda: self.warmup(updates, state, values, count, alone),
            "compressed": lambda: self.compressed(updates, state, values, count),
        }
        index = (state.frozen_at > 0).astype(jnp.int32)
        new_updates, state = run_stage(stages, index, stage)
        return optax.tree.cast_like(new_updates, updates), state._replace(count=count)

    def warmup(
        self,
        gradients: optax.Updates,
        state: ScaleByOnebitLambState,
        params: optax.Params,
        count: Int32[Array, ""],
        alone: bool,
    ) -> tuple[optax.Updates, ScaleByOnebitLambState]:
        """LAMB on the exact mean, until the freeze rule fires."""
        exact = exact_mean(self.exchange.axes)
        mean, _ = exact.update(gradients, exact.init(gradients))
        mean = optax.tree.cast(mean, jnp.float32)
        mu = optax.tree.update_moment(mean, state.mu, self.b1, 1)
        if not alone:
            return self.lamb(mean, mu, state, params, count)
        # A program of this stage alone may run on after the freeze.
        late = state._replace(late=state.late + 1)
        return lax.cond(
            state.frozen_at > 0,
            lambda: self.frozen_lamb(mu, late, params, count),
            lambda: self.lamb(mean, mu, state, params, count),
        )

    def lamb(
        self,
        mean: optax.Updates,
        mu: optax.Params,
        state: ScaleByOnebitLambState,
        params: optax.Params,
        count: Int32[Array, ""],
    ) -> tuple[optax.Updates, ScaleByOnebitLambState]:
        """A step of LAMB, and the freeze at its end if the rule fires."""
        nu = optax.tree.update_moment_per_elem_norm(mean, state.nu, self.b2, 2)
        direction = jax.tree.map(
            jnp.divide, self.corrected(mu, self.b1, count), self.roots(nu, count)
        )
        update, decay = self.weight_decay.update(direction, state.decay, params)
        ratio = trust_ratio(params, update, self.ratio_limits)

        def mean_with(new: ArrayLike, before: Array) -> Array:
            after = self.ratio_decay * before + (1 - self.ratio_decay) * new
            return jnp.where(ratio == 1, before, after)

        norm = self.corrected(optax.tree.sum(nu), self.b2, count)
        now, rule = asks_to_freeze(
            self.freeze, state.freeze, count, norm, self.exchange
        )
        state = state._replace(
            mu=mu,
            nu=nu,
            ratio=mean_with(ratio, state.ratio),
            ratio_weight=mean_with(1.0, state.ratio_weight),
            freeze=rule,
            decay=decay,
        )
        # This step is still LAMB's: the frozen variance is for those after it.
        return times(ratio, update), lax.cond(
            now, lambda: self.freeze_now(state, count), lambda: state
        )

    def freeze_now(
        self, state: ScaleByOnebitLambState, count: Int32[Array, ""]
    ) -> ScaleByOnebitLambState:
        """The state with the variance frozen, and layers' magnitudes."""
        nu, floored = state.nu, state.floored
        if self.floor is not None:
            nu, floored = self.floor.apply(nu)
        return state._replace(
            nu=nu,
            nu_fresh=nu,
            frozen_at=count,
            magnitude=equal_magnitudes(state.mu),
            floored=floored,
        )

    def compressed(
        self,
        gradients: optax.Updates,
        state: ScaleByOnebitLambState,
        params: optax.Params,
        count: Int32[Array, ""],
    ) -> tuple[optax.Updates, ScaleByOnebitLambState]:
        """A step by the momentum, which is exchanged with all layers' magnitudes alike.

        A program of this stage alone freezes the variance first, if it is not frozen.
        """
        frozen = state.frozen_at > 0
        state = state._replace(
            frozen_at=jnp.where(frozen, state.frozen_at, jnp.maximum(state.count, 1)),
            nu_fresh=optax.tree.where(frozen, state.nu_fresh, state.nu),
            magnitude=lax.cond(
                frozen, lambda: state.magnitude, lambda: equal_magnitudes(state.mu)
            ),
        )
        mu, exchanged = exchange_scaled_momentum(
            self.exchange,
            state.magnitude,
            gradients,
            state.mu,
            self.b1,
            state.exchange,
        )
        state = state._replace(exchange=exchanged)
        return self.frozen_lamb(mu, state, params, count)

    def frozen_lamb(
        self,
        mu: optax.Params,
        state: ScaleByOnebitLambState,
        params: optax.Params,
        count: Int32[Array, ""],
    ) -> tuple[optax.Updates, ScaleByOnebitLambState]:
        """A step with frozen variance and ratios, by an agreed momentum."""
        gradient = jax.tree.map(
            lambda m, last: (m - self.b1 * last) / (1 - self.b1), mu, state.mu
        )
        nu_fresh = optax.tree.update_moment_per_elem_norm(
            gradient, state.nu_fresh, self.b2, 2
        )
        roots = self.roots(state.nu, state.frozen_at)
        unbounded = jax.tree.map(jnp.divide, self.corrected(mu, self.b1, count), roots)
        direction = cut(unbounded, self.bound)
        update, decay = self.weight_decay.update(direction, state.decay, params)
        factor = next_factor(
            state.factor,
            roots,
            self.roots(nu_fresh, count),
            direction=direction,
            update=update,
            limits=self.factor_limits,
            change=self.factor_change,
        )
        return times(self.frozen_ratio(state) * factor, update), state._replace(
            mu=mu,
            nu_fresh=nu_fresh,
            factor=factor,
            bounded=share_beyond(unbounded, self.bound),
            decay=decay,
        )

    def corrected(
        self, moment: optax.Params, decay: ArrayLike, steps: Int32[Array, ""]
    ) -> optax.Params:
        """A moment corrected for its start from zero, if bias correction is on."""
        if not self.bias_correction:
            return moment
        return divide_by_weight(moment, decay, steps)

    def roots(self, nu: optax.Params, steps: Int32[Array, ""]) -> optax.Params:
        """The root, plus eps, of a variance from so many steps."""
        nu = self.corrected(nu, self.b2, steps)
        return jax.tree.map(lambda v: jnp.sqrt(v) + self.eps, nu)

    def frozen_ratio(self, state: ScaleByOnebitLambState) -> Float32[Array, " layers"]:
        """The mean ratio of each layer in the warm-up."""
        if not self.bias_correction:
            return state.ratio
        counted = state.ratio_weight > 0
        return jnp.where(
            counted, state.ratio / jnp.where(counted, state.ratio_weight, 1), 1
        )
