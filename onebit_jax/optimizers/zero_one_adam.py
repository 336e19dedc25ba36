"""0/1 Adam: a variance refreshed at growing intervals, one bit between, local steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import optax

from onebit_jax.exchanges.exchange import Exchange
from onebit_jax.optimizers.bound import BOUND, cut
from onebit_jax.optimizers.floor import FloorAtMean
from onebit_jax.optimizers.freeze import FreezeRule, warn_if_rising
from onebit_jax.optimizers.intervals import IntervalRule, growing_intervals
from onebit_jax.optimizers.moments import as_float32, weight
from onebit_jax.optimizers.onebit_adam import FLOOR, warmup_mean
from onebit_jax.optimizers.own_moments import as_own, own_moments, zero_moments
from onebit_jax.optimizers.zero_one_adam_state import ZeroOneAdamState
from onebit_jax.workers.axes import bound_workers, to_varying
from onebit_jax.workers.stages import run_stage
from onebit_jax.workers.worker_local import WorkerLocal

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Bool, Int32

_NAME = "0/1 Adam"

REFRESH = growing_intervals(16)
SYNC = growing_intervals(32768, longest=16)

AS_DEEPSPEED: dict[str, Any] = {
    "before_freeze": "gradient",
    "decay": "accumulated",
    "bias_correction": False,
    "floor": None,
    "bound": None,
}
"""Arguments of `zero_one_adam` with which it computes what DeepSpeed 0.19.6 does.

With `deepspeed_sign_mean` as the exchange, a freeze one step later than
`var_freeze_step`, and the intervals that DeepSpeed's are:
`growing_intervals(var_update_scaler, aligned=True)` of refreshments and
`growing_intervals(local_step_scaler, longest=local_step_clipper, counting='steps',
aligned=True)` of synchronisation.
"""

BeforeFreeze = Literal["momentum", "gradient"]
Decay = Literal["agreed", "accumulated"]


def zero_one_adam(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    freeze: FreezeRule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    refresh: IntervalRule = REFRESH,
    variance_exchange: Exchange | None = None,
    sync: IntervalRule = SYNC,
    before_freeze: BeforeFreeze = "momentum",
    decay: Decay = "agreed",
    bias_correction: bool = True,
    floor: FloorAtMean | None = FLOOR,
    bound: ArrayLike | None = BOUND,
) -> optax.GradientTransformationExtraArgs:
    r"""0/1 Adam with decoupled weight decay.

    Each worker i takes steps of its own, with :math:`\gamma_t = \alpha_t / (1 -
    \beta_1^t)`,

    .. math::
      m^{(i)} &\leftarrow \beta_1 m^{(i)} + (1 - \beta_1) g_t^{(i)} \\
      d^{(i)} &\leftarrow d^{(i)} - \gamma_t \,\mathrm{clip}\left(
      \frac{m^{(i)}}{\sqrt{\hat v} + \epsilon}, \pm B\right), \quad
      \Gamma \leftarrow \Gamma + \gamma_t

    and computes its gradients at :math:`p + d^{(i)}` (`onebit_jax.local_params`). In
    a step that synchronises, with :math:`E` the exchange,

    .. math::
      \bar m &= -\tfrac1\Gamma E[d^{(i)} (\sqrt{\hat v} + \epsilon)], \quad
      p \leftarrow p - \Gamma \,\mathrm{clip}\left(
      \frac{\bar m}{\sqrt{\hat v} + \epsilon}, \pm B\right) \\
      m^{(i)} &\leftarrow \bar m, \quad
      d^{(i)} \leftarrow 0, \quad \Gamma \leftarrow 0

    and in one that refreshes the variance, before all of this,
    :math:`v \leftarrow \beta_2 v + (1 - \beta_2) \bar g_t^2` with the exact mean of
    the gradients. Until the freeze every step synchronises and those that `refresh`
    says refresh; after it the variance stays, and those that `sync` says synchronise.

    Where the paper and DeepSpeed 0.19.6 differ, the paper's is the default, and
    `**AS_DEEPSPEED` is the other. DeepSpeed exchanges gradients until the freeze,
    exactly where the variance is due, and forgets the errors at the freeze
    (`before_freeze`); its weight decay enters what is exchanged, and so the momentum
    (`decay`); it corrects no moment for its start from zero. Here as there it is the
    momentum with this step's gradient that is accumulated: without it a
    synchronisation in every step would drop the gradients.

    Args:
      learning_rate: :math:`\alpha`, a number, or a schedule from the step.
      exchange: what workers do with what they have accumulated, such as `sign_mean`.
      freeze: when the variance is refreshed no more, such as `freeze_at(1000)`; not
        before the learning rate's warm-up ends. `freeze_when_stable` freezes in steps
        that refresh alone, and compares with the variance as it was Δ steps before.
      b1: decay of the momentum.
      b2: decay of the variance, by refreshment.
      eps: added to the root of the variance.
      weight_decay: :math:`\lambda`, a number or a schedule from the step; times the
        learning rate, as in `optax.adamw`.
      mask: a tree of booleans like the parameters', or a function from parameters to
        one, that says which leaves decay; None for all.
      refresh: which steps before the freeze refresh the variance, beside the first.
      variance_exchange: what workers do with the gradients that refresh it, such as
        `quantized_mean('data', 4)`; None for the exact mean.
      sync: which steps after the freeze synchronise; `every(1)` for all.
      before_freeze: what is exchanged until the freeze, 'momentum' or 'gradient'.
      decay: 'agreed' for a decay of the agreed parameters in every step, 'accumulated'
        for a decay of each worker's own that is exchanged with its steps.
      bias_correction: whether both moments are corrected for their start from zero.
      floor: what becomes of variances near zero at the freeze; None to leave them.
      bound: B, the largest step of a coordinate in learning rates; None for none.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with each
      worker's own gradients, at its own parameters, and with the agreed parameters.
      Its updates are of the agreed parameters, the learning rate in them: zero, but
      for the decay, in a step that does not synchronise. It takes one extra argument,
      `stage`: 'variance', 'gradient' (where gradients are exchanged), 'compressed' or
      'local', which has no collective; None for a program of all.

    Raises:
      TypeError: if exchange, freeze, refresh, sync or floor is not what it must be.
      ValueError: if `before_freeze` or `decay` is neither of its values, or the bound
        is not more than 0.

    Warns:
      UserWarning: if the variance may be frozen while the learning rate still rises.

    Example:
      >>> import onebit_jax
      >>> tx = onebit_jax.zero_one_adam(
      ...     1e-3,
      ...     onebit_jax.sign_mean('data'),
      ...     onebit_jax.freeze_at(1000),
      ...     sync=onebit_jax.growing_intervals(500, longest=4),
      ... )

    References:
      Lu et al., 0/1 Adam, 2022, https://arxiv.org/abs/2202.06009, Algorithm 1 and
      section 6.
    """
    _check(exchange, freeze, refresh, sync, floor, bound, before_freeze, decay)
    warn_if_rising(learning_rate, freeze)
    if not callable(weight_decay):
        weight_decay = as_float32(weight_decay)
    whole = warmup_mean(variance_exchange, exchange, "variance_exchange")
    adam = _ZeroOneAdam(
        learning_rate=learning_rate,
        exchange=exchange,
        freeze=freeze,
        b1=as_float32(b1),
        b2=as_float32(b2),
        eps=as_float32(eps),
        refresh=refresh,
        variance_exchange=whole,
        sync=sync,
        before_freeze=before_freeze,
        decay=decay,
        weight_decay=optax.add_decayed_weights(weight_decay, mask),
        bias_correction=bias_correction,
        floor=floor,
        bound=bound,
    )
    init: Any = adam.init
    return optax.GradientTransformationExtraArgs(init, adam.update)


def _check(
    exchange: Any,
    freeze: Any,
    refresh: Any,
    sync: Any,
    floor: Any,
    bound: Any,
    before_freeze: str,
    decay: str,
) -> None:
    if not isinstance(exchange, Exchange) or not isinstance(freeze, FreezeRule):
        raise TypeError(
            "0/1 Adam needs an exchange, such as sign_mean('data'), and a freeze rule, "
            f"such as freeze_at(1000), got {exchange!r} and {freeze!r}."
        )
    for name, rule in (("refresh", refresh), ("sync", sync)):
        if not isinstance(rule, IntervalRule):
            raise TypeError(
                f"{name} must be a rule of intervals, such as growing_intervals(16), "
                f"got {rule!r}."
            )
    if floor is not None and not isinstance(floor, FloorAtMean):
        raise TypeError(f"floor must be a FloorAtMean or None, got {floor!r}.")
    if isinstance(bound, (int, float)) and not bound > 0:
        raise ValueError(f"bound must be more than 0, or None for none, got {bound}.")
    if before_freeze not in ("momentum", "gradient"):
        raise ValueError(
            f"before_freeze must be 'momentum' or 'gradient', got {before_freeze!r}."
        )
    if decay not in ("agreed", "accumulated"):
        raise ValueError(f"decay must be 'agreed' or 'accumulated', got {decay!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ZeroOneAdam:
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
        """The first two are those until the freeze, the last two those after it."""
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
        del extra_args
        bound_workers(self.exchange.axes)
        frozen = state.frozen_at > 0
        count = jnp.asarray(optax.safe_increment(state.count))
        refreshes, refresh = self.refresh.update(state.refresh, count)
        syncs, sync = self.sync.update(state.sync, count)
        # Until the freeze the one goes on, after it the other.
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
        # Without a variance there is no step.
        refreshes |= state.refreshed == 0
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
        new_updates = jax.tree.map(lambda u, g: u.astype(g.dtype), new_updates, updates)
        return new_updates, self.at_freeze(
            state._replace(taken=taken), jnp.asarray(index == 0)
        )

    def refresh_both(
        self, gradients: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """The variance and the momentum with the mean of the gradients."""
        return self.agreed_step(*self.refreshed(gradients, state), params)

    def refresh_and_synchronise(
        self, gradients: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """The variance with the mean of the gradients, the momentum by its exchange."""
        _, state = self.refreshed(gradients, state)
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
        state = self.moved(gradients, state, params)
        return optax.tree.zeros_like(state.nu), state

    def synchronise(
        self, gradients: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """A step of each worker's own, and all since the last agreed on."""
        state = self.moved(gradients, state, params)
        roots = self.roots(state)
        sums = jax.tree.map(lambda d, root: d[0] * root, state.moved.value, roots)
        agreed, exchange = self.exchange.update(sums, state.exchange)
        # The mean momentum of the steps, each weighed with its rate; of rates of zero
        # alone there is none.
        some = state.rates > 0
        mu = _scaled(-1 / jnp.where(some, state.rates, 1), agreed)
        return _scaled(-state.rates, self.steps(mu, roots)), state._replace(
            own_mu=optax.tree.where(some, self.own(mu), state.own_mu),
            moved=self.own(optax.tree.zeros_like(mu)),
            rates=jnp.zeros([], jnp.float32),
            exchange=exchange,
        )

    def moved(
        self, gradients: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> ZeroOneAdamState:
        """The state after a step of each worker's own."""
        before, moved = (
            own_moments(node, gradients, self.exchange.axes, _NAME)
            for node in (state.own_mu, state.moved)
        )
        mu = optax.tree.update_moment(gradients, before, self.b1, 1)
        steps = self.steps(mu, self.roots(state))
        if self.decay == "accumulated":
            steps, state = self.decayed(steps, state, state.local_params(params))
        rate = self.corrected_rate(state.count)
        moved = jax.tree.map(lambda d, u: d - rate * u, moved, steps)
        return state._replace(
            own_mu=self.own(mu), moved=self.own(moved), rates=state.rates + rate
        )

    def agreed_step(
        self, mean: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """A step that all workers take, with an agreed gradient."""
        mu = optax.tree.update_moment(mean, state.mu, self.b1, 1)
        steps = self.steps(mu, self.roots(state))
        if self.decay == "accumulated":
            steps, state = self.decayed(steps, state, params)
        rate = self.corrected_rate(state.count)
        return _scaled(-rate, steps), state._replace(mu=mu)

    def refreshed(
        self, gradients: optax.Updates, state: ZeroOneAdamState
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """The mean of the gradients, and the state with it in the variance.

        A program that has no other stage goes on after the freeze with what is frozen.
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
        self, state: ZeroOneAdamState, refreshed: Bool[Array, ""]
    ) -> ZeroOneAdamState:
        """The state with the variance frozen, if the rule fires now."""
        norm = jnp.asarray(optax.tree.sum(state.nu), jnp.float32)
        norm = norm / self.variance_weight(state)
        fires, rule = self.freeze.update(state.freeze, state.count, norm)
        now = fires & (state.frozen_at == 0)
        if self.freeze.by_norm:
            # Between refreshments every variance is stable.
            now &= refreshed
        raised, floored = state.nu, 0.0
        if self.floor is not None:
            raised, floored = self.floor.apply(state.nu)
        own, exchange = state.own_mu.value, state.exchange
        if state.mu is not None:
            own = optax.tree.where(now, self.own(state.mu).value, own)
            # Errors of gradients are none of accumulated momenta.
            exchange = jax.tree.map(lambda e: jnp.where(now, 0, e), exchange)
        return state._replace(
            own_mu=dataclasses.replace(state.own_mu, value=own),
            nu=optax.tree.where(now, raised, state.nu),
            frozen_at=jnp.where(now, state.count, state.frozen_at),
            floored=jnp.where(now, floored, state.floored),
            freeze=rule,
            exchange=exchange,
        )

    def steps(self, mu: optax.Params, roots: optax.Params) -> optax.Updates:
        """Momenta beside the roots of the variance, cut to the bound."""
        return cut(jax.tree.map(jnp.divide, mu, roots), self.bound)

    def decayed(
        self, steps: optax.Updates, state: ZeroOneAdamState, params: Any
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        """Steps plus the decay of parameters, agreed ones or a worker's own."""
        steps, decay = self.weight_decay.update(steps, state.decay, params)
        return steps, state._replace(decay=decay)

    def roots(self, state: ZeroOneAdamState) -> optax.Params:
        """The roots of the variance, with what keeps them from zero."""
        divisor = self.variance_weight(state)
        return jax.tree.map(lambda v: jnp.sqrt(v / divisor) + self.eps, state.nu)

    def corrected_rate(self, count: Int32[Array, ""]) -> Array:
        """The learning rate of a step, with the correction of the momentum."""
        return self.rate(count - 1) / self.weight(self.b1, count)

    def rate(self, count: Int32[Array, ""]) -> Array:
        """The learning rate after so many steps."""
        rate: Any = self.learning_rate
        return jnp.asarray(rate(count) if callable(rate) else rate, jnp.float32)

    def weight(self, decay: ArrayLike, steps: Int32[Array, ""]) -> Array:
        """The weight of so many values in a running mean, if it is to be corrected."""
        return weight(decay, steps) if self.bias_correction else jnp.float32(1)

    def variance_weight(self, state: ZeroOneAdamState) -> Array:
        """The weight of all refreshments; that of one where there is none yet."""
        return self.weight(self.b2, jnp.maximum(state.refreshed, 1))

    def own(self, tree: Any) -> WorkerLocal:
        """A tree as each worker's own, though it be agreed."""
        return as_own(to_varying(tree, self.exchange.axes), self.exchange.axes)


def _scaled(factor: Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: factor * x, tree)
