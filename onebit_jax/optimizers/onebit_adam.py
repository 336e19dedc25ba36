"""1-bit Adam: warm-up Adam, the variance freeze, then one bit a parameter."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.exchanges.exchange import Exchange, gradient_mean
from onebit_jax.optimizers.bound import BOUND, cut, share_beyond
from onebit_jax.optimizers.checks import check_parts
from onebit_jax.optimizers.floor import FLOOR, FloorAtMean
from onebit_jax.optimizers.freeze import FreezeRule
from onebit_jax.optimizers.growth import GrowthByMeanSquares, GrowthState
from onebit_jax.optimizers.intervals import IntervalRule
from onebit_jax.optimizers.moments import (
    as_float32,
    divide_by_weight,
    extrapolate,
    weight,
)
from onebit_jax.optimizers.onebit_adam_state import (
    RefreshState,
    ScaleByOnebitAdamState,
)
from onebit_jax.workers.arithmetic import zero_after
from onebit_jax.workers.axes import bound_workers
from onebit_jax.workers.stages import run_stage

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Int32

Send = Literal["gradient", "momentum"]

LEAD = 1.14
"""The steps of the smallest loss in docs/studies/decoder.md."""
GROWTH = GrowthByMeanSquares()

_BOUNDED_EVERY = 8


class Parts(TypedDict):
    """The parts of the compressed stage that can be left out."""

    send: Send
    lead: ArrayLike | None
    growth: GrowthByMeanSquares | None
    floor: FloorAtMean | None
    bound: ArrayLike | None


AS_PUBLISHED: Parts = {
    "send": "momentum",
    "lead": None,
    "growth": None,
    "floor": None,
    "bound": None,
}
"""The paper's compressed stage: nothing but the momentum and the frozen variance."""


def scale_by_onebit_adam(
    exchange: Exchange,
    freeze: FreezeRule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    bias_correction: bool = True,
    warmup_exchange: Exchange | None = None,
    refresh: IntervalRule | None = None,
    send: Send = "momentum",
    lead: ArrayLike | None = LEAD,
    growth: GrowthByMeanSquares | None = GROWTH,
    floor: FloorAtMean | None = FLOOR,
    bound: ArrayLike | None = BOUND,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales each worker's own gradients by 1-bit Adam.

    In the warm-up, Adam on the exact mean of the gradients; a single worker, which has
    nobody to exchange with, stays in it. After the freeze, with
    :math:`v` as it was then, after T steps, and :math:`E` the exchange,

    .. math::
      m_t &= E[\beta_1 m_{t-1} + (1 - \beta_1) g_t^{(i)}], \quad
      \hat m_t = \frac{m_t}{1 - \beta_1^t} \\
      u_t &= \mathrm{clip}\left(\frac{\hat m_t + d (\hat m_t - \hat m_{t-1})}
      {\sqrt{\rho_t v / (1 - \beta_2^T)} + \epsilon}, \pm B\right)

    The paper has no growth :math:`\rho`, floor of v, bound B and lead d: without them
    (`**AS_PUBLISHED`) it is the paper's.

    Args:
      exchange: what workers do with their momenta, such as `sign_mean`.
      freeze: when the variance is frozen; not before the learning rate has risen,
        which nothing here can see. `onebit_adam` knows the learning rate, and warns.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the root of the variance.
      bias_correction: whether both moments are corrected for their start from
        zero. The variance's correction is frozen with it.
      warmup_exchange: what workers do with their gradients in the warm-up, such as
        `quantized_mean('data', 4)` for an eighth of the bytes; None for the exact
        mean. Its errors are of no use after the freeze, and stay in the state.
      refresh: which steps of the warm-up are Adam's and refresh the variance, such as
        `growing_intervals(16)`; the first always is one. The steps between them, of
        the stage 'between', exchange as those after the freeze do. A variance that was
        last refreshed k steps ago counts the new squares for k steps, with
        :math:`1 - \beta_2^k`. Floor and bound act in the warm-up too. The freeze rule
        is asked in steps that refresh alone, so that the freeze may come up to an
        interval later, and is not `freeze_when_stable`, whose lag is in steps. None
        for all steps of the warm-up.
      send: 'momentum' to exchange momenta, as the paper does, 'gradient' to exchange
        gradients and take their momentum, :math:`m_t = \beta_1 m_{t-1} +
        (1 - \beta_1) E[g_t^{(i)}]`.
      lead: d, the steps by which the momentum is extrapolated after the freeze, as
        error feedback delays it. d = b1 is Nesterov's momentum. None for none. More
        than the default without a bound has diverged.
      growth: :math:`\rho_t`, of gradients that grow after the freeze and would
        otherwise raise the learning rate with them; None for 1.
      floor: what becomes of variances near zero at the freeze; None to leave them.
      bound: B, the largest update of a coordinate after the freeze; None for none. A
        sign cannot say how small a value is: where a block holds coordinates of very
        different variances, those of the smallest get the largest updates. Adam's
        own are at most :math:`(1-\beta_1)/\sqrt{(1-\beta_2)(1-\beta_1^2/\beta_2)}`,
        7.3 with the default decays.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with
      each worker's own gradients. Moments are float32 whatever the parameters are;
      updates have the gradients' dtype. `update` takes one extra argument, `stage`:
      None (default) compiles all stages into one program that chooses by the
      state; 'warmup', 'between' or 'compressed' compiles one. One compressed step in
      `growth.period` measures the growth; its bytes are counted apart, as those of
      the stage 'compressed/measuring'. A
      'warmup' step with a frozen variance exchanges exactly and leaves it frozen; a
      compressed step with a variance that is not frozen freezes it as it is, and must
      not be the first step: there is no variance yet (`data_parallel` refuses it).

    Raises:
      TypeError: if an argument is not of its type, or the exchange returns votes.
      ValueError: if `send` is neither 'gradient' nor 'momentum', the lead is negative
        or not finite, the bound is not more than 0, the exchanges' axes differ, or
        `freeze_when_stable` is to compare variances of steps that do not refresh.

    Example:
      >>> import onebit_jax, optax
      >>> tx = optax.chain(
      ...     scale_by_onebit_adam(
      ...         onebit_jax.sign_mean('data'), onebit_jax.freeze_at(1000)
      ...     ),
      ...     optax.scale_by_learning_rate(1e-3),
      ... )

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888,
      Algorithm 1.
    """
    check_parts("1-bit Adam", exchange, freeze, floor, bound)
    warm = gradient_mean(warmup_exchange, exchange, "warmup_exchange")
    if send not in ("gradient", "momentum"):
        raise ValueError(f"send must be 'gradient' or 'momentum', got {send!r}.")
    for name, part, kind in (
        ("refresh", refresh, IntervalRule),
        ("growth", growth, GrowthByMeanSquares),
    ):
        if part is not None and not isinstance(part, kind):
            raise TypeError(f"{name} must be a {kind.__name__} or None, got {part!r}.")
    if refresh is not None and freeze.by_norm:
        raise ValueError(
            "freeze_when_stable needs a variance that is refreshed in every step: "
            "leave refresh out, or use freeze_at."
        )
    if isinstance(lead, (int, float)) and not 0 <= lead < math.inf:
        raise ValueError(
            f"lead must be a finite number of steps from 0 on, or None, got {lead}."
        )
    adam = _OnebitAdam(
        exchange=exchange,
        warm=warm,
        freeze=freeze,
        b1=as_float32(b1),
        b2=as_float32(b2),
        eps=as_float32(eps),
        bias_correction=bias_correction,
        refresh=refresh,
        send=send,
        lead=None if lead is None else as_float32(lead),
        growth=growth,
        floor=floor,
        bound=bound,
    )
    init: Any = adam.init
    return optax.GradientTransformationExtraArgs(init, adam.update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OnebitAdam:
    exchange: Exchange
    warm: Exchange
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
        return ScaleByOnebitAdamState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=jnp.float32),
            nu=optax.tree.zeros_like(params, dtype=jnp.float32),
            frozen_at=jnp.zeros([], jnp.int32),
            floored=jnp.zeros([], jnp.float32),
            bounded=jnp.zeros([], jnp.float32),
            freeze=self.freeze.init(),
            refresh=self.refresh
            and RefreshState(
                self.refresh.init(), jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)
            ),
            growth=self.growth and self.growth.init(params),
            exchange=self.exchange.init(params),
            warmup=self.warm.init(params),
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
            # Without a variance there is no step.
            due |= state.refresh.times == 0
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
        mean, exchanged = self.warm.update(gradients, state.warmup)
        mean = optax.tree.cast(mean, jnp.float32)
        mu = optax.tree.update_moment(mean, state.mu, self.b1, 1)
        state = state._replace(mu=mu, warmup=exchanged)
        if not alone:
            return self.adam(mean, state, count)
        # A program that has no other stage goes on after it with what is frozen.
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
            # The first one's state may come from Adam, which refreshed in every step.
            last = jnp.where(refresh.times == 0, count - 1, refresh.last)
            decay = self.b2 ** (count - last).astype(jnp.float32)
            refresh = refresh._replace(times=refresh.times + 1, last=count)
        nu = optax.tree.update_moment_per_elem_norm(mean, state.nu, decay, 2)
        norm = self.corrected(optax.tree.sum(nu), self.b2, count)
        fires, rule = self.freeze.update(
            state.freeze, count, jnp.asarray(norm, jnp.float32)
        )
        now = fires & (not self.exchange.is_alone())
        growth = state.growth
        if self.growth is not None and growth is not None:
            growth = self.growth.freeze(self.growth.from_variance(nu, growth), now)
        raised, floored = nu, 0.0
        if self.floor is not None:
            raised, floored = self.floor.apply(nu)
        # This step is still Adam's, and floor and bound are for those after it. But
        # with steps between, signs have moved coordinates without a variance.
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
        """A step by the new, exact momentum, beside the frozen variance."""
        growth = state.growth
        if self.growth is not None and growth is not None:
            growth = self.growth.follow_mean(mean, growth, self.b2)
        nu = self.grown(state.nu, growth, count, state.frozen_at)
        direction = self.corrected(state.mu, self.b1, count)
        new_updates = cut(self.ratio(direction, nu, state.frozen_at), self.bound)
        return new_updates, state._replace(growth=growth)

    def between(
        self,
        gradients: optax.Updates,
        state: ScaleByOnebitAdamState,
        count: Int32[Array, ""],
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        """The momentum by the exchange, beside the variance as last refreshed."""
        mu, exchanged = self.agreed(gradients, state)
        nu = state.nu if self.floor is None else self.floor.apply(state.nu)[0]
        direction = self.led(mu, state.mu, count)
        steps = jnp.maximum(state.refresh.last, 1) if state.refresh else count
        new_updates = self.ratio(direction, nu, steps)
        return cut(new_updates, self.bound), state._replace(mu=mu, exchange=exchanged)

    def compressed(
        self,
        gradients: optax.Updates,
        state: ScaleByOnebitAdamState,
        count: Int32[Array, ""],
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        """The momentum by the exchange, beside the frozen variance."""
        frozen = state.frozen_at > 0
        taken = state.count if state.refresh is None else state.refresh.last
        frozen_at = jnp.where(frozen, state.frozen_at, jnp.maximum(taken, 1))
        mu, exchanged = self.agreed(gradients, state)
        growth, followed = state.growth, frozen_at
        if self.growth is not None and growth is not None:
            growth = self.growth.follow(
                gradients,
                self.growth.freeze(growth, ~frozen),
                decay=self.b2,
                count=count + zero_after(mu),
                axes=self.exchange.axes,
            )
            followed += self.growth.period * growth.measured

        def unbounded() -> optax.Updates:
            direction = self.led(mu, state.mu, count)
            nu = self.grown(state.nu, growth, followed, frozen_at)
            return self.ratio(direction, nu, frozen_at)

        # Of updates computed once more: kept for it, they would be written to memory.
        bounded = lax.cond(
            count % _BOUNDED_EVERY == 0,
            lambda: share_beyond(unbounded(), self.bound),
            lambda: state.bounded,
        )
        return cut(unbounded(), self.bound), state._replace(
            mu=mu,
            frozen_at=frozen_at,
            bounded=bounded,
            growth=growth,
            exchange=exchanged,
        )

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
        """A moment without its start from zero, if that is to be corrected."""
        if not self.bias_correction:
            return moment
        return divide_by_weight(moment, decay, steps)

    def led(
        self, mu: optax.Params, last: optax.Params, count: Int32[Array, ""]
    ) -> optax.Params:
        """The corrected momentum, ahead by the lead."""
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
        """A corrected momentum beside the root of a variance of so many steps."""
        nu = self.corrected(nu, self.b2, steps)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + self.eps), mu, nu)

    def grown(
        self,
        nu: optax.Params,
        growth: GrowthState | None,
        followed: Int32[Array, ""],
        frozen_at: Int32[Array, ""],
    ) -> optax.Params:
        """Frozen variances with their growth, which has followed so many steps."""
        if self.growth is None or growth is None:
            return nu
        return self.growth.grow(
            nu,
            growth,
            weight_now=weight(self.b2, followed) if self.bias_correction else 1,
            weight_frozen=weight(self.b2, frozen_at) if self.bias_correction else 1,
        )
