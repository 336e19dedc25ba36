"""0/1 Adam: a variance refreshed at intervals, one bit a value, local steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.optimizers.parts.checks import check_parts, gradient_mean
from onebit_jax.optimizers.parts.compressed import Compressed, check_compressed
from onebit_jax.optimizers.parts.freeze import Freezing, stage_refusal, warn_if_rising
from onebit_jax.optimizers.parts.intervals import (
    check_interval_rule,
    growing_intervals,
    steps_before_due,
    update_in_stage,
)
from onebit_jax.optimizers.parts.moments import as_float32, weight
from onebit_jax.workers.axes import bound_workers, check_floats, check_local
from onebit_jax.workers.per_worker import each_own, this_worker
from onebit_jax.workers.stages import run_stage
from onebit_jax.workers.states import optimizer_state, own_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32, Int32

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.optimizers.parts.freeze import FreezeRule
    from onebit_jax.optimizers.parts.intervals import IntervalRule

BeforeFreeze = Literal["momentum", "gradient"]
Decay = Literal["agreed", "accumulated"]

_REFRESH = growing_intervals(16)
_SYNC = growing_intervals(32768, longest=16)
_PARTS = Compressed(lead=None, growth=None)
_STAGES = "variance", "gradient", "compressed", "local"


@optimizer_state
class ZeroOneAdamState(NamedTuple):
    """State of `zero_one_adam`.

    Attributes:
      count: number of steps taken.
      mu: the agreed momentum until the freeze, float32, where gradients are exchanged
        until then; else None.
      own_mu: each worker's momentum, float32, a `WorkerLocal` for each leaf.
      nu: variance, float32, without bias correction.
      refreshed: how often it was refreshed.
      moved: by how much each worker's parameters differ from the agreed ones, float32,
        a `WorkerLocal` for each leaf; zero after a synchronisation.
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
    own_mu: Any
    nu: optax.Params
    refreshed: Int32[Array, ""]
    moved: Any
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

    local_stages = ("local",)
    warmup_stages = ("variance", "gradient")

    def distance(self) -> Any:
        """Each worker's own steps since the last synchronisation."""
        return self.moved

    def steps_by_stage(self) -> dict[str, Array]:
        """Steps taken in each stage."""
        # A tree's dictionaries are in the order of their keys.
        return {name: self.taken[name] for name in _STAGES if name in self.taken}

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

    def steps_left(self, stage: str) -> int | None:
        """The steps that workers take alone before a synchronisation is due."""
        return steps_before_due(self.sync) if stage == "local" else None

    def refusal(self, stage: str) -> str | None:
        """Until the freeze workers do not step alone, after it nothing refreshes."""
        if stage == "compressed" and self.mu is None:
            # Of momenta all along, once there is a variance.
            return stage_refusal(self.refreshed, stage, first="variance")
        first = stage if stage in ("variance", "gradient") else "variance"
        return stage_refusal(self.frozen_at, stage, first)


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
    refresh: IntervalRule = _REFRESH,
    variance_exchange: Exchange | None = None,
    sync: IntervalRule = _SYNC,
    before_freeze: BeforeFreeze = "momentum",
    decay: Decay = "agreed",
    bias_correction: bool = True,
    compressed: Compressed = _PARTS,
) -> optax.GradientTransformationExtraArgs:
    r"""0/1 Adam with decoupled weight decay.

    Each worker i takes steps of its own, with :math:`\gamma_t = \alpha_t / (1 -
    \beta_1^t)`,

    .. math::
      m^{(i)} &\leftarrow \beta_1 m^{(i)} + (1 - \beta_1) g_t^{(i)} \\
      d^{(i)} &\leftarrow d^{(i)} - \gamma_t \,\mathrm{clip}\left(
      \frac{m^{(i)}}{\sqrt{\hat v} + \epsilon}, \pm B_t\right), \quad
      \Gamma \leftarrow \Gamma + \gamma_t

    and computes its gradients at :math:`p + d^{(i)}` (`onebit_jax.own_params`).
    :math:`B_t` is B in a step that the worker takes alone. In one that synchronises
    it is n B, so that none of the n workers alone moves the mean by more than B, and,
    with :math:`E` the exchange,

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
    One worker alone, and one host by `hierarchical`, refreshes in every step and
    freezes nothing, as Adam does.

    Where the paper and DeepSpeed 0.19.6 differ, the paper's is the default, and
    docs/examples/from_deepspeed.py has the other. DeepSpeed exchanges gradients until
    the freeze, exactly where the variance is due, and forgets the errors at the freeze
    (`before_freeze`). Its weight decay enters what is exchanged, and so the momentum
    (`decay`). It corrects no moment for its start from zero. Here as there it is the
    momentum with this step's gradient that is accumulated: without it a synchronisation
    in every step would drop the gradients.

    Args:
      learning_rate: :math:`\alpha`, a number, or a schedule from the step that does not
        fall sharply. Errors of the exchange are as large as the learning rates of the
        steps that made them. Over far smaller ones they make the momentum explode.
      exchange: what workers do with what they have accumulated, such as `sign_mean`.
      freeze: when the variance is refreshed no more, such as `freeze_at(1000)`; not
        before the learning rate's warm-up ends. `freeze_when_stable` freezes in steps
        that refresh alone, and compares with the variance as it was Δ steps before.
        Where refreshes are nearly as far apart it tells nothing, so limit their
        intervals, as `growing_intervals(16, longest=8)` does, or take `freeze_at`.
      b1: decay of the momentum.
      b2: decay of the variance, each time that it is refreshed.
      eps: added to the root of the variance.
      weight_decay: :math:`\lambda`, a number or a schedule from the step. An 'agreed'
        decay is multiplied by the learning rate, as in `optax.adamw`, an 'accumulated'
        one by :math:`\gamma_t`, which bias correction makes larger in the first steps.
      mask: a tree of booleans like the parameters', or a function from parameters to
        one, that says which leaves decay; None for all.
      refresh: which steps before the freeze refresh the variance, beside the first.
      variance_exchange: what workers do with the gradients that refresh it, such as
        `quantized_mean('data', 4)`; None for the exact mean.
      sync: which steps after the freeze synchronise; `every(1)` for all. By default,
        which is the paper's, the first 32,768 all do: give it for shorter runs.
      before_freeze: what is exchanged until the freeze, 'momentum' or 'gradient'.
      decay: 'agreed' for a decay of the agreed parameters in every step, 'accumulated'
        for a decay of each worker's own that is exchanged with its steps.
      bias_correction: whether both moments are corrected for their start from zero.
      compressed: floor of the variances at the freeze, and bound B of an agreed step
        of a coordinate in units of :math:`\Gamma`, neither in the paper.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with each
      worker's own gradients, at its own parameters, and with the agreed parameters.
      In a chain it must be the last: what scaled its updates would not scale the
      workers' own steps. Its updates are those of the agreed parameters and contain the
      learning rate; but for the decay they are zero in a step that does not
      synchronise. It takes one
      extra argument, `stage`: 'variance', 'gradient' (where gradients are exchanged),
      'compressed' or 'local', which has no collective; None for a program of all. A
      stage that cannot be the state's next is refused by `data_parallel`.

    Raises:
      TypeError: if an argument is not of its type, or an exchange returns votes.
      ValueError: if `before_freeze` or `decay` is neither of its values, a lead or
        growth is given, or, from `update`, without parameters.

    Warns:
      UserWarning: if the variance may be frozen while the learning rate still rises.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.zero_one_adam(
      ...     0.1,
      ...     onebit_jax.sign_mean('data'),
      ...     onebit_jax.freeze_at(1),
      ...     sync=onebit_jax.every(2),
      ... )
      >>> batch = jnp.array([[3.0, -5.0], [1.0, -1.0]])  # a line a worker
      >>> run = onebit_jax.simulated(lambda p, x: jnp.mean(x @ p), tx, workers=2)
      >>> params, state = run.init(jnp.zeros(2))
      >>> for _ in range(3):
      ...     params, state, loss = run.step(params, state, batch)
      ...     print(params.round(3))
      [-0.1  0.1]
      [-0.1  0.1]
      [-0.3  0.3]

    References:
      Lu et al., 0/1 Adam, 2022, https://arxiv.org/abs/2202.06009, Algorithm 1 and
      section 6.
    """
    check_parts("0/1 Adam", exchange, freeze)
    check_compressed("0/1 Adam", compressed, has_only=("floor", "bound"))
    _check(refresh, sync, before_freeze, decay)
    warn_if_rising(learning_rate, freeze)
    if not callable(weight_decay):
        weight_decay = as_float32(weight_decay)
    adam = _ZeroOneAdam(
        learning_rate=learning_rate,
        exchange=exchange,
        freeze=freeze,
        b1=as_float32(b1),
        b2=as_float32(b2),
        eps=as_float32(eps),
        refresh=refresh,
        variance_exchange=gradient_mean(
            variance_exchange, exchange, "variance_exchange"
        ),
        sync=sync,
        before_freeze=before_freeze,
        decay=decay,
        weight_decay=optax.add_decayed_weights(weight_decay, mask),
        bias_correction=bias_correction,
        parts=compressed,
    )
    init: Any = adam.init
    return optax.GradientTransformationExtraArgs(init, adam.update)


def _check(refresh: Any, sync: Any, before_freeze: str, decay: str) -> None:
    check_interval_rule("refresh", refresh)
    check_interval_rule("sync", sync)
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
    parts: Compressed

    def init(self, params: optax.Params) -> ZeroOneAdamState:
        def zeros() -> optax.Params:
            return optax.tree.zeros_like(params, dtype=jnp.float32)

        check_floats(params, "0/1 Adam")

        def zero() -> Array:
            return jnp.zeros([], jnp.int32)

        # Each anew: a buffer that is in a state twice cannot be donated.
        return ZeroOneAdamState(
            count=zero(),
            mu=zeros() if self.before_freeze == "gradient" else None,
            own_mu=each_own(zeros(), self.exchange.axes),
            nu=zeros(),
            refreshed=zero(),
            moved=each_own(zeros(), self.exchange.axes),
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
        check_local(updates, self.exchange.axes, "0/1 Adam")
        frozen = state.frozen_at > 0
        count = jnp.asarray(optax.safe_increment(state.count))
        refreshes, refresh = self.refresh.update(state.refresh, count)
        happens = None if stage is None else stage != "local"
        syncs, sync = update_in_stage(self.sync, state.sync, count, happens)
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
            # Without a refresh the norm is unchanged, and a rule of norms would fire.
            can_be = jnp.asarray(index == 0) | (not self.freeze.reads_norm)
            freezing = Freezing(self.freeze, self.exchange, self.norm, self.frozen)
            state = lax.cond(
                frozen, lambda: state, lambda: freezing.if_due(state, can_be)
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
        moved = this_worker(state.moved, self.exchange.axes)
        sums = jax.tree.map(jnp.multiply, moved, roots)
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
            this_worker(own, self.exchange.axes) for own in (state.own_mu, state.moved)
        )
        mu = optax.tree.update_moment(gradients, before, self.b1, 1)
        direction = self.direction(mu, self.roots(state), times_bound)
        if self.decay == "accumulated":
            own = own_params(params, (state,))
            direction, state = self.decayed(direction, state, own)
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
        """The mean of the gradients, and the state with it in the variance."""
        mean, exchanged = self.variance_exchange.update(
            gradients, state.variance_exchange
        )
        nu = optax.tree.update_moment_per_elem_norm(mean, state.nu, self.b2, 2)
        return mean, state._replace(
            nu=nu, refreshed=state.refreshed + 1, variance_exchange=exchanged
        )

    def norm(self, state: ZeroOneAdamState) -> Any:
        """The 1-norm of the variance."""
        return optax.tree.sum(state.nu) / self.variance_weight(state)

    def frozen(self, state: ZeroOneAdamState) -> ZeroOneAdamState:
        """The variance frozen; momenta are each worker's own from here on."""
        nu, floored = self.parts.raised(state.nu)
        own_mu, exchange = state.own_mu, state.exchange
        if state.mu is not None:
            own_mu = self.own(state.mu)
            # From now on momenta are exchanged, and these errors are of gradients.
            exchange = jax.tree.map(jnp.zeros_like, exchange)
        return state._replace(
            own_mu=own_mu,
            nu=nu,
            frozen_at=state.count,
            floored=floored,
            exchange=exchange,
        )

    def direction(
        self, mu: optax.Params, roots: optax.Params, times_bound: int = 1
    ) -> optax.Updates:
        """Momenta over the roots of the variance, cut to a multiple of the bound."""
        return self.parts.cut(jax.tree.map(jnp.divide, mu, roots), times_bound)

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

    def own(self, tree: Any) -> Any:
        """A tree as worker-local state, whether or not workers agree on it."""
        return each_own(tree, self.exchange.axes)


def _scaled(factor: Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: factor * x, tree)
