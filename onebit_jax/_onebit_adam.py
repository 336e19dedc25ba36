"""1-bit Adam: warm-up Adam, the variance freeze, the exchange of what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import _axes
from onebit_jax._exchange import Exchange, exact_mean
from onebit_jax._freeze import FreezeRule
from onebit_jax._per_worker import PerWorker
from onebit_jax._power import (
    PERIOD,
    Power,
    followed,
    init_own_lines,
    init_power,
    line_count,
    raise_low,
    update_power,
)
from onebit_jax._stages import COMPRESSED_SCOPE, WARMUP_SCOPE, Stage, check_stage

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32, Int32

# About the largest update that Adam itself makes, (1 - b1) / sqrt(1 - b2).
MAX_UPDATE = 3.0


class ScaleByOnebitAdamState(NamedTuple):
    """State of `scale_by_onebit_adam`.

    Attributes:
      count: number of steps taken.
      mu: momentum, float32, the same on all workers.
      nu: variance, float32, without bias correction; frozen once `frozen_at` is set.
      power: of the workers' gradients, in running means.
      own_lines: each worker's own, by rows and columns, part of which it exchanges.
      frozen_at: number of warm-up steps taken when the variance was frozen; 0 as
        long as it is not.
      frozen_power: `power` at the freeze.
      floored: share of the frozen variances that were raised to their leaf's mean.
      freeze: state of the freeze rule.
      exchange: state of the exchange.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: optax.Params
    nu: optax.Params
    power: Power
    own_lines: Any
    frozen_at: Int32[Array, ""]
    frozen_power: Power
    floored: Float32[Array, ""]
    freeze: Any
    exchange: Any


def scale_by_onebit_adam(
    exchange: Exchange,
    freeze: FreezeRule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    bias_correction: bool = True,
    as_published: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales each worker's own gradients by 1-bit Adam.

    In the warm-up, Adam on the exact mean of the gradients. After the freeze, with
    :math:`v` as it was then, after T steps, and :math:`E` the exchange,

    .. math::
      m_t = \beta_1 m_{t-1} + (1 - \beta_1) E[g_t^{(i)}], \quad
      \hat m_t = \frac{m_t}{1 - \beta_1^t}, \quad
      u_t = \mathrm{clip}\left(\frac{\hat m_t + d (\hat m_t - \hat m_{t-1})}
      {\sqrt{\rho_t v / (1 - \beta_2^T)} + \epsilon}, \pm 3\right)

    Four things are not the paper's, which exchanges :math:`m_t = E[\beta_1 m_{t-1} +
    (1 - \beta_1) g_t^{(i)}]` and has no d, no :math:`\rho` and no bound:

    - All workers know :math:`m_{t-1}` already. Sent again it makes scales, and so
      errors, larger.
    - What error feedback owes comes late, by d steps in the mean: the exchange's
      `delay`, 0 for an exact one and 1.14 for `sign_mean`, of normally distributed
      values. The momentum is led by as much, in leaves too small for signs as well.
    - :math:`\rho_t` is how the power of the gradients has grown since the freeze.
      With p, r and c the mean squares of the workers' gradients in a leaf, in a row and
      in a column of a matrix, running means of decay :math:`\beta_2`,

      .. math::
        \rho_{t,kl} = \frac{p_t}{p_T} \max\left(
        \frac{r_{t,k} / p_t}{r_{T,k} / p_T}
        \frac{c_{t,l} / p_t}{c_{T,l} / p_T}, \tfrac14\right)

      Gradients that grow after the freeze would otherwise raise the learning rate
      with them. What stays frozen is how a matrix's variance differs from a product of
      one factor a row and one a column. In each step p is exchanged and one in 32 of
      the shares r / p and c / p. A matrix is the last two dimensions of a leaf, those
      before them number matrices, and c is then relative to its matrix; where one of
      the two is less than 16, and in one dimension, :math:`\rho` is p's growth alone.
      A kernel of many heads of few values each is better given with heads and values
      as one dimension.
    - A sign cannot say zero: a coordinate whose frozen variance is zero, because it
      had no gradient yet, would move by its scale / eps. Its variance is frozen as
      its leaf's mean instead, times the shares of its row and column where these had
      gradients, or is the leaf's power while the whole leaf had none; and no update
      exceeds 3, about the largest that Adam itself makes,
      :math:`(1-\beta_1)/\sqrt{1-\beta_2}`.

    Args:
      exchange: what workers do with their gradients, such as `sign_mean`.
      freeze: when the variance is frozen.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the root of the variance.
      bias_correction: whether both moments are corrected for their start from
        zero. The variance's correction is frozen with it.
      as_published: whether the compressed stage is the paper's to the letter.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with
      each worker's own gradients. Moments are float32 whatever the parameters are;
      updates have the gradients' dtype. `update` takes one extra argument, `stage`:
      None (default) compiles both stages into one program that chooses by the
      state; 'warmup' or 'compressed' compiles one. A 'warmup' step with a frozen
      variance exchanges exactly and leaves it frozen; a 'compressed' step with a
      variance that is not frozen freezes it as it is.

    Raises:
      TypeError: if `exchange` is not an exchange or `freeze` not a freeze rule.

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
    if not isinstance(exchange, Exchange) or not isinstance(freeze, FreezeRule):
        raise TypeError(
            "1-bit Adam needs an exchange, such as sign_mean('data'), and a freeze "
            f"rule, such as freeze_at(1000), got {exchange!r} and {freeze!r}."
        )
    exact = exact_mean(exchange.axes)

    def init_fn(params: optax.Params) -> ScaleByOnebitAdamState:
        lines = 0 if as_published else line_count(params)
        return ScaleByOnebitAdamState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=jnp.float32),
            nu=optax.tree.zeros_like(params, dtype=jnp.float32),
            power=init_power(params, lines),
            own_lines=init_own_lines(lines, exchange.axes),
            frozen_at=jnp.zeros([], jnp.int32),
            frozen_power=init_power(params, lines),
            floored=jnp.zeros([], jnp.float32),
            freeze=freeze.init(),
            exchange=exchange.init(params),
        )

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        stage: Stage | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, Any]:
        del params, extra_args
        check_stage(stage)
        _axes.bound_workers(exchange.axes)
        decay1, decay2, epsilon = map(_as_float32, (b1, b2, eps))
        count = jnp.asarray(optax.safe_increment(state.count))

        def weight(decay: ArrayLike, steps: Int32[Array, ""]) -> ArrayLike:
            # What all gradients so far weigh in a moment that began at zero.
            return 1 - decay ** steps.astype(jnp.float32) if bias_correction else 1

        def corrected(
            moment: optax.Params, decay: ArrayLike, steps: Int32[Array, ""]
        ) -> optax.Params:
            if not bias_correction:
                return moment
            share = weight(decay, steps)
            return jax.tree.map(lambda m: m / share, moment)

        def running_power(period: int) -> tuple[Power, PerWorker]:
            if as_published:
                return state.power, state.own_lines
            return update_power(
                updates,
                state.power,
                state.own_lines,
                decay=decay2,
                count=count,
                period=period,
            )

        def corrected_power(power: Power, steps: Int32[Array, ""]) -> Power:
            return power._replace(leaves=corrected(power.leaves, decay2, steps))

        def grown_since_freeze(
            power: Power, frozen_power: Power, frozen_at: Int32[Array, ""]
        ) -> optax.Params:
            if as_published:
                return state.nu
            return followed(
                state.nu,
                corrected_power(power, count),
                corrected_power(frozen_power, frozen_at),
                weight(decay2, frozen_at),
            )

        def ratio(
            mu: optax.Params, nu: optax.Params, variance_steps: Int32[Array, ""]
        ) -> optax.Updates:
            nu = corrected(nu, decay2, variance_steps)
            return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mu, nu)

        def led(mu: optax.Params) -> optax.Params:
            # Corrected before they are compared: a momentum's rise from zero is no lag.
            last = corrected(state.mu, decay1, jnp.maximum(state.count, 1))
            delay = jnp.where(state.count > 0, exchange.delay, 0.0)
            return jax.tree.map(
                lambda m, before: m + delay * (m - before),
                corrected(mu, decay1, count),
                last,
            )

        def warmup() -> tuple[optax.Updates, ScaleByOnebitAdamState]:
            with jax.named_scope(WARMUP_SCOPE):
                mean, _ = exact.update(updates, exact.init(updates))
                mean = optax.tree.cast(mean, jnp.float32)
                mu = optax.tree.update_moment(mean, state.mu, decay1, 1)
                nu = optax.tree.update_moment_per_elem_norm(mean, state.nu, decay2, 2)
                # Chosen by the state, this branch finds no variance frozen.
                frozen = (state.frozen_at > 0) & (stage == "warmup")
                nu = optax.tree.where(frozen, state.nu, nu)
                steps = jnp.where(frozen, state.frozen_at, count)
                norm = corrected(optax.tree.sum(nu), decay2, steps)
                fires, rule_state = freeze.update(
                    state.freeze, count, jnp.asarray(norm, jnp.float32)
                )
                now = fires & ~frozen
                power, own_lines = running_power(1)
                grown = optax.tree.where(
                    frozen, grown_since_freeze(power, state.frozen_power, steps), nu
                )
                # This step is still Adam's; a floor and a bound are for those after it.
                bound = jnp.where(frozen & (not as_published), MAX_UPDATE, jnp.inf)
                new_updates = optax.tree.clip(
                    ratio(corrected(mu, decay1, count), grown, steps), -bound, bound
                )
                raised, share = (nu, 0.0) if as_published else raise_low(nu, power)
                return new_updates, state._replace(
                    mu=mu,
                    nu=optax.tree.where(now, raised, nu),
                    power=power,
                    own_lines=own_lines,
                    frozen_at=jnp.where(fires | frozen, steps, 0),
                    frozen_power=optax.tree.where(now, power, state.frozen_power),
                    floored=jnp.where(now, share, state.floored),
                    freeze=rule_state,
                )

        def compressed() -> tuple[optax.Updates, ScaleByOnebitAdamState]:
            with jax.named_scope(COMPRESSED_SCOPE):
                frozen = state.frozen_at > 0
                frozen_at = jnp.where(
                    frozen, state.frozen_at, jnp.maximum(state.count, 1)
                )
                frozen_power = optax.tree.where(frozen, state.frozen_power, state.power)
                power, own_lines = running_power(PERIOD)
                if as_published:
                    mu, exchange_state = exchange.exchange_momentum(
                        updates, state.mu, decay1, state.exchange
                    )
                    new_updates = ratio(
                        corrected(mu, decay1, count), state.nu, frozen_at
                    )
                else:
                    gradients = optax.tree.cast(updates, jnp.float32)
                    agreed, exchange_state = exchange.update(gradients, state.exchange)
                    mu = optax.tree.update_moment(agreed, state.mu, decay1, 1)
                    ahead = led(mu)
                    nu = grown_since_freeze(power, frozen_power, frozen_at)
                    new_updates = optax.tree.clip(
                        ratio(ahead, nu, frozen_at), -MAX_UPDATE, MAX_UPDATE
                    )
                return new_updates, state._replace(
                    mu=mu,
                    power=power,
                    own_lines=own_lines,
                    frozen_at=frozen_at,
                    frozen_power=frozen_power,
                    exchange=exchange_state,
                )

        if stage is None:
            new_updates, state = lax.cond(state.frozen_at > 0, compressed, warmup)
        else:
            new_updates, state = warmup() if stage == "warmup" else compressed()
        new_updates = jax.tree.map(lambda u, g: u.astype(g.dtype), new_updates, updates)
        return new_updates, state._replace(count=count)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _as_float32(x: ArrayLike) -> float | Float32[Array, ""]:
    # Python numbers stay weakly typed: Optax's arithmetic to the last bit. Others,
    # such as inject_hyperparams' arrays in the parameters' dtype, are promoted.
    return x if isinstance(x, (int, float)) else jnp.asarray(x, jnp.float32)
