"""1-bit LAMB: warm-up LAMB, the freeze, then one bit a parameter."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax.exchanges.exchange import exact_mean
from onebit_jax.optimizers.parts.checks import check_parts
from onebit_jax.optimizers.parts.compressed import Compressed, check_compressed
from onebit_jax.optimizers.parts.error_norms import error_norms
from onebit_jax.optimizers.parts.freeze import (
    Freezing,
    freeze_then,
    stage_refusal,
    warn_if_rising,
)
from onebit_jax.optimizers.parts.moments import as_float32, divide_by_weight
from onebit_jax.workers.arithmetic import numbers_of, row
from onebit_jax.workers.states import optimizer_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32, Int32

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.optimizers.parts.freeze import FreezeRule

_PARTS = Compressed(lead=None, growth=None)

# A layer whose momentum is below this share of the layers' mean magnitude is not
# scaled: its later gradients would be scaled far above all others', or beyond float32.
_NEGLIGIBLE = 1e-6


@optimizer_state
class ScaleByOnebitLambState(NamedTuple):
    """State of `scale_by_onebit_lamb`, the same on all workers but for the exchange.

    A number of each layer stands in one row of all, in the order of the leaves: trees
    of scalars would take longer to compile than all else.

    Attributes:
      count: number of steps taken.
      mu: momentum, float32.
      nu: variance, float32, without bias correction; frozen once `frozen_at` is set.
      nu_fresh: variance that goes on after the freeze, from gradients that are
        restored from momenta; zero before.
      frozen_at: number of warm-up steps taken when the variance was frozen; 0 as
        long as it is not.
      ratio: (layers,) running mean, from zero, of each layer's ratio of norms in the
        warm-up.
      ratio_weight: (layers,) weight of all ratios so far in that mean.
      factor: (layers,) on the frozen ratio in the last step; 1 before the freeze.
      magnitude: (layers,) a factor of momenta that are exchanged; 1 before the freeze.
      floored: share of the frozen variances that the floor raised.
      freeze: state of the freeze rule.
      decay: state of the weight decay.
      exchange: state of the exchange.
      warmup: state of the exact mean that the warm-up takes.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: optax.Params
    nu: optax.Params
    nu_fresh: optax.Params
    frozen_at: Int32[Array, ""]
    ratio: Float32[Array, " layers"]
    ratio_weight: Float32[Array, " layers"]
    factor: Float32[Array, " layers"]
    magnitude: Float32[Array, " layers"]
    floored: Float32[Array, ""]
    freeze: Any
    decay: Any
    exchange: Any
    warmup: Any

    warmup_stages = ("warmup",)

    def steps_by_stage(self) -> dict[str, Array]:
        """Warm-up, and compressed steps."""
        warmup = jnp.where(self.frozen_at > 0, self.frozen_at, self.count)
        return {"warmup": warmup, "compressed": self.count - warmup}

    def metrics(self) -> dict[str, Array]:
        """Measures of the optimizer; see `onebit_jax.metrics`.

        Returns:
          Those of 1-bit Adam, its errors beside momenta brought to one magnitude; and
          `largest_factor`, the largest factor on a layer's frozen ratio.
        """
        (magnitude,) = numbers_of(self.mu, self.magnitude)
        return {
            "count": self.count,
            "compressed": (self.frozen_at > 0).astype(jnp.int32),
            "frozen_at": self.frozen_at,
            "floored_share": self.floored,
            "largest_factor": jnp.max(self.factor),
            **error_norms(self.exchange, _times(magnitude, self.mu)),
        }

    def refusal(self, stage: str) -> str | None:
        """Before the freeze only the warm-up can be, after it only the other."""
        return stage_refusal(self.frozen_at, stage)


def scale_by_onebit_lamb(
    exchange: Exchange,
    freeze: FreezeRule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    bias_correction: bool = True,
    ratio_limits: tuple[float, float] = (0.01, 10.0),
    ratio_decay: ArrayLike = 0.9,
    factor_limits: tuple[float, float] = (0.5, 4.0),
    factor_change: ArrayLike = 0.1,
    compressed: Compressed = _PARTS,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales each worker's own gradients by 1-bit LAMB, a leaf being a layer.

    In the warm-up, LAMB on the exact mean of the gradients: with :math:`\hat m` and
    :math:`\hat v` Adam's moments,

    .. math::
      u_t = \frac{\hat m_t}{\sqrt{\hat v_t} + \epsilon} + \lambda p_{t-1}, \quad
      c_t = \mathrm{clip}\left(\frac{\|p_{t-1}\|}{\|u_t\|}, c_{min}, c_{max}\right)

    and :math:`c_t u_t` is what is returned. A running mean :math:`\bar c` of the
    ratios is frozen with the variance, after T steps. From then on, with :math:`E` the
    exchange and :math:`s` factors that make the momenta of all layers alike,

    .. math::
      m_t &= E[\beta_1 s m_{t-1} + (1 - \beta_1) s g_t^{(i)}] / s, \quad
      \tilde g_t = \frac{m_t - \beta_1 m_{t-1}}{1 - \beta_1} \\
      w_t &= \beta_2 w_{t-1} + (1 - \beta_2) \tilde g_t^2, \quad w_T = v_T \\
      d_t &= \mathrm{clip}\left(\frac{\hat m_t}{\sqrt{\hat v_T} + \epsilon},
      \pm B\right), \quad u_t = d_t + \lambda p_{t-1}, \quad
      \rho_t = \min\left(1, \frac{\|d_t\|}{\|u_t\|}\right) \\
      r_t &= \mathrm{clip}\left(1 - \rho_t + \rho_t \max_j
      \frac{\sqrt{\hat v_{T,j}} + \epsilon}{\sqrt{\hat w_{t,j}} + \epsilon},
      r_{min}, r_{max}\right)

    changed by `factor_change` a step at most, and :math:`\bar c\, r_t u_t` is what is
    returned. The paper has no floor of v and no bound B: without them
    (`Compressed.published()`) and without bias correction it is the paper's.

    Args:
      exchange: what workers do with their momenta, such as `sign_mean`.
      freeze: when variance and ratios are frozen.
      b1: decay of the momentum.
      b2: decay of both variances.
      eps: added to the root of a variance.
      weight_decay: λ, a number or a schedule from the step. It is part of the update
        that the ratio is of.
      mask: a tree of booleans like the parameters', or a function from parameters
        to one, that says which leaves decay; None for all.
      bias_correction: whether moments and mean ratios are corrected for their start
        from zero; the variance's and the ratios' correction is frozen with them.
      ratio_limits: :math:`c_{min}` and :math:`c_{max}`, DeepSpeed's min_coeff and
        max_coeff; its recipe for BERT has 0.01 and 0.3. A layer of zeros, and an update
        of zeros, have the ratio 1, whatever the limits.
      ratio_decay: decay of the running mean of ratios, DeepSpeed's coeff_beta. A ratio
        of exactly 1 is left out of the mean; without bias correction a layer that has
        no other is frozen with the ratio 0, as DeepSpeed's is.
      factor_limits: :math:`r_{min}` and :math:`r_{max}`, DeepSpeed's factor_min and
        factor_max.
      factor_change: the largest relative change of :math:`r` in a step, from
        :math:`r_T = 1`; DeepSpeed's factor_threshold.
      compressed: floor and bound of the compressed stage, which are not in the paper.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with
      each worker's own gradients and the parameters. Moments are float32 whatever the
      parameters are; updates have the gradients' dtype. `update` takes one extra
      argument, `stage`: None (default) compiles both stages into one program that
      chooses by the state; 'warmup' or 'compressed' compiles one, which must be the
      state's next.

    Raises:
      TypeError: if an argument is not of its type, or the exchange returns votes.
      ValueError: if limits are not in order, a decay or a change is out of range, a
        lead or growth is given, or, from `update`, without parameters.

    Example:
      >>> import jax.numpy as jnp, onebit_jax, optax
      >>> tx = optax.chain(
      ...     scale_by_onebit_lamb(
      ...         onebit_jax.sign_mean('data'), onebit_jax.freeze_at(1)
      ...     ),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> batch = jnp.array([[3.0, -5.0], [1.0, -1.0]])  # a line a worker
      >>> run = onebit_jax.simulated(lambda p, x: jnp.mean(x @ p), tx, workers=2)
      >>> params, state = run.init(jnp.ones(2))
      >>> for _ in range(2):
      ...     params, state, loss = run.step(params, state, batch)
      >>> print(params.round(3))
      [0.8 1.2]

    References:
      Li et al., 1-bit LAMB, 2021, https://arxiv.org/abs/2104.06069; You et al., Large
      batch optimization for deep learning, 2020, https://arxiv.org/abs/1904.00962,
      Algorithm 2, for LAMB; DeepSpeed 0.19.6, `runtime/fp16/onebit/lamb.py`, for the
      share :math:`\rho` and the defaults.
    """
    check_parts("1-bit LAMB", exchange, freeze)
    check_compressed("1-bit LAMB", compressed, has_only=("floor", "bound"))
    for name, limits in ("ratio", ratio_limits), ("factor", factor_limits):
        low, high = limits
        if not 0 <= low <= high:
            raise ValueError(
                f"{name}_limits must be two numbers from 0 on, the smaller one first, "
                f"got {limits!r}."
            )
    if isinstance(ratio_decay, (int, float)) and not 0 <= ratio_decay < 1:
        raise ValueError(f"ratio_decay must be from 0 to below 1, got {ratio_decay}.")
    if isinstance(factor_change, (int, float)) and not factor_change >= 0:
        raise ValueError(f"factor_change must not be negative, got {factor_change}.")
    if not callable(weight_decay):
        weight_decay = as_float32(weight_decay)
    lamb = _OnebitLamb(
        exchange=exchange,
        warmup_exchange=exact_mean(exchange.axes),
        freeze=freeze,
        b1=as_float32(b1),
        b2=as_float32(b2),
        eps=as_float32(eps),
        weight_decay=optax.add_decayed_weights(weight_decay, mask),
        bias_correction=bias_correction,
        ratio_limits=_floats(ratio_limits),
        ratio_decay=as_float32(ratio_decay),
        factor_limits=_floats(factor_limits),
        factor_change=as_float32(factor_change),
        parts=compressed,
    )
    update = freeze_then(
        lamb.warmup, lamb.compressed, Freezing(freeze, exchange, lamb.norm, lamb.frozen)
    )

    def with_params(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> Any:
        if params is None:
            raise ValueError("1-bit LAMB needs the parameters: give them to update.")
        params = optax.tree.cast(params, jnp.float32)
        return update(updates, state, params, **extra_args)

    init: Any = lamb.init
    return optax.GradientTransformationExtraArgs(init, with_params)


def _floats(limits: tuple[float, float]) -> tuple[float, float]:
    # NumPy's float64 would make float64 of what it meets.
    low, high = limits
    return float(low), float(high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OnebitLamb:
    exchange: Exchange
    warmup_exchange: Exchange
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
    parts: Compressed

    def init(self, params: optax.Params) -> ScaleByOnebitLambState:
        layers = max(len(jax.tree.leaves(params)), 1)
        # Each anew: a buffer that is in a state twice cannot be donated.
        mu, nu, nu_fresh = (
            optax.tree.zeros_like(params, dtype=jnp.float32) for _ in range(3)
        )
        return ScaleByOnebitLambState(
            count=jnp.zeros([], jnp.int32),
            mu=mu,
            nu=nu,
            nu_fresh=nu_fresh,
            frozen_at=jnp.zeros([], jnp.int32),
            ratio=jnp.zeros(layers, jnp.float32),
            ratio_weight=jnp.zeros(layers, jnp.float32),
            factor=jnp.ones(layers, jnp.float32),
            magnitude=jnp.ones(layers, jnp.float32),
            floored=jnp.zeros([], jnp.float32),
            freeze=self.freeze.init(),
            decay=self.weight_decay.init(params),
            exchange=self.exchange.init(params),
            warmup=self.warmup_exchange.init(params),
        )

    def warmup(
        self, gradients: optax.Updates, state: ScaleByOnebitLambState, params: Any
    ) -> tuple[optax.Updates, ScaleByOnebitLambState]:
        """LAMB on the exact mean of the gradients."""
        mean, exchanged = self.warmup_exchange.update(gradients, state.warmup)
        mean = optax.tree.cast(mean, jnp.float32)
        mu = optax.tree.update_moment(mean, state.mu, self.b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(mean, state.nu, self.b2, 2)
        direction = jax.tree.map(
            jnp.divide,
            self.corrected(mu, self.b1, state.count),
            self.roots(nu, state.count),
        )
        update, decay = self.weight_decay.update(direction, state.decay, params)
        ratio = _trust_ratio(params, update, self.ratio_limits)

        def mean_with(new: ArrayLike, before: Array) -> Array:
            mean = self.ratio_decay * before + (1 - self.ratio_decay) * new
            return jnp.where(ratio == 1, before, mean)

        (of_layer,) = numbers_of(update, ratio)
        return _times(of_layer, update), state._replace(
            mu=mu,
            nu=nu,
            ratio=mean_with(ratio, state.ratio),
            ratio_weight=mean_with(jnp.float32(1), state.ratio_weight),
            decay=decay,
            warmup=exchanged,
        )

    def norm(self, state: ScaleByOnebitLambState) -> Any:
        """The 1-norm of the variance."""
        return self.corrected(optax.tree.sum(state.nu), self.b2, state.count)

    def frozen(self, state: ScaleByOnebitLambState) -> ScaleByOnebitLambState:
        """The variance frozen, and layers' magnitudes."""
        nu, floored = self.parts.raised(state.nu)
        return state._replace(
            nu=nu,
            nu_fresh=nu,
            frozen_at=state.count,
            magnitude=_equal_magnitudes(state.mu),
            floored=floored,
        )

    def compressed(
        self, gradients: optax.Updates, state: ScaleByOnebitLambState, params: Any
    ) -> tuple[optax.Updates, ScaleByOnebitLambState]:
        """A step by the exchanged momentum, with frozen variance and ratios."""
        # Of all layers in one magnitude: an exchange that has one scale for values of
        # several layers would lose those of the smaller ones.
        magnitude, back = numbers_of(gradients, state.magnitude, 1 / state.magnitude)
        scaled, exchanged = self.exchange.exchange_momentum(
            _times(magnitude, gradients),
            _times(magnitude, state.mu),
            self.b1,
            state.exchange,
        )
        mu = _times(back, scaled)
        gradient = jax.tree.map(
            lambda m, last: (m - self.b1 * last) / (1 - self.b1), mu, state.mu
        )
        nu_fresh = optax.tree.update_moment_per_elem_norm(
            gradient, state.nu_fresh, self.b2, 2
        )
        roots = self.roots(state.nu, state.frozen_at)
        direction = self.parts.cut(
            jax.tree.map(jnp.divide, self.corrected(mu, self.b1, state.count), roots)
        )
        update, decay = self.weight_decay.update(direction, state.decay, params)
        factor = _next_factor(
            state.factor,
            roots,
            self.roots(nu_fresh, state.count),
            direction=direction,
            update=update,
            limits=self.factor_limits,
            change=self.factor_change,
        )
        (ratio,) = numbers_of(update, self.frozen_ratio(state) * factor)
        return _times(ratio, update), state._replace(
            mu=mu, nu_fresh=nu_fresh, factor=factor, decay=decay, exchange=exchanged
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
        mean = state.ratio / jnp.where(counted, state.ratio_weight, 1)
        return jnp.where(counted, mean, 1)


def _times(factors: Any, tree: Any) -> Any:
    """Each layer of a tree times its factor, in float32."""
    return jax.tree.map(lambda f, x: f * x.astype(jnp.float32), factors, tree)


def _norms(tree: Any) -> Float32[Array, " layers"]:
    """The 2-norm of each layer."""
    return jnp.sqrt(row(lambda x: jnp.sum(jnp.square(x)), tree))


def _equal_magnitudes(momentum: optax.Params) -> Float32[Array, " layers"]:
    r"""Factors that bring the momenta of all layers to one magnitude.

    .. math::
      s_l = \frac{1}{\mathrm{rms}(m_l)} \frac1L \sum_k \mathrm{rms}(m_k)

    over the L layers that have a momentum; 1 for a layer with less than a millionth of
    the mean.
    """
    sizes = row(lambda m: jnp.float32(float(max(m.size, 1))), momentum)
    magnitudes = _norms(momentum) / jnp.sqrt(jnp.maximum(sizes, 1))
    number = jnp.sum(magnitudes > 0, dtype=jnp.float32)
    mean = jnp.sum(magnitudes) / jnp.maximum(number, 1)
    known = magnitudes > _NEGLIGIBLE * mean
    return jnp.where(known, mean / jnp.where(known, magnitudes, 1), 1)


def _trust_ratio(
    params: optax.Params, update: optax.Updates, limits: tuple[float, float]
) -> Float32[Array, " layers"]:
    """LAMB's ratio of each layer; 1, whatever the limits, where a norm is zero."""
    of_params, of_update = _norms(params), _norms(update)
    both = (of_params > 0) & (of_update > 0)
    ratio = of_params / jnp.where(both, of_update, 1)
    return jnp.where(both, jnp.clip(ratio, *limits), 1)


def _next_factor(
    last: Float32[Array, " layers"],
    frozen: optax.Params,
    fresh: optax.Params,
    *,
    direction: optax.Updates,
    update: optax.Updates,
    limits: tuple[float, float],
    change: ArrayLike,
) -> Float32[Array, " layers"]:
    """The factor r on each layer's frozen ratio, from what its variance has become.

    Args:
      last: r of the step before.
      frozen: the divisors by the frozen variance.
      fresh: those by the variance of now.
      direction: the update without weight decay.
      update: with it. One of zeros has a share of 1.
      limits: the smallest and the largest factor.
      change: the largest relative change in a step.
    """
    of_update = _norms(update)
    some = of_update > 0
    share = _norms(direction) / jnp.where(some, of_update, 1)
    share = jnp.where(some, jnp.minimum(share, 1), 1)
    largest = row(lambda v, w: jnp.max(v / w, initial=0.0), frozen, fresh)
    factor = jnp.clip(1 - share + share * largest, *limits)
    return jnp.clip(factor, last * (1 - change), last * (1 + change))


def onebit_lamb(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    freeze: FreezeRule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    bias_correction: bool = True,
    ratio_limits: tuple[float, float] = (0.01, 10.0),
    ratio_decay: ArrayLike = 0.9,
    factor_limits: tuple[float, float] = (0.5, 4.0),
    factor_change: ArrayLike = 0.1,
    compressed: Compressed = _PARTS,
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit LAMB: LAMB until the variance is stable, then one bit a parameter.

    .. math:: p_t = p_{t-1} - \alpha_t c_t u_t

    with the ratio :math:`c_t` of each layer, after the freeze :math:`\bar c\, r_t`,
    and the update :math:`u_t`, weight decay included, of `scale_by_onebit_lamb`. Before
    the freeze it is `optax.lamb` on the exact mean of the workers' gradients, but for
    the limits of the ratio.

    Args:
      learning_rate: a number, or a schedule from the step.
      exchange: what workers do with their momenta, such as
        `onebit_jax.sign_mean('data')`.
      freeze: when variance and ratios are frozen, such as
        `onebit_jax.freeze_at(1000)`.
      b1: decay of the momentum.
      b2: decay of both variances.
      eps: added to the root of a variance.
      weight_decay: λ. As in `optax.lamb`, it is part of the update that the ratio is
        of, and is multiplied by ratio and learning rate.
      mask: a tree of booleans like the parameters', or a function from parameters
        to one, that says which leaves decay; None for all.
      bias_correction: whether moments and mean ratios are corrected for their start
        from zero.
      ratio_limits: the smallest and the largest ratio of norms.
      ratio_decay: decay of the running mean of ratios.
      factor_limits: the smallest and the largest factor on a frozen ratio.
      factor_change: the largest relative change of that factor in a step.
      compressed: floor of the variances at the freeze, and bound of a coordinate's
        update after it, before weight decay and ratio;
        `onebit_jax.Compressed.published()` leaves both out.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with
      each worker's own gradients and the parameters; `onebit_jax.data_parallel` does
      so.

    Raises:
      TypeError, ValueError: as `scale_by_onebit_lamb` does.

    Warns:
      UserWarning: if the variance may be frozen while the learning rate still rises.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.onebit_lamb(
      ...     0.1, onebit_jax.sign_mean('data'), onebit_jax.freeze_at(5)
      ... )
      >>> def loss_fn(p, x):
      ...     return jnp.mean((x @ (p - 1)) ** 2)
      >>> run = onebit_jax.data_parallel(loss_fn, tx, mesh)
      >>> params, state = run.init(jnp.full(2, 0.5))
      >>> for _ in range(30):
      ...     params, state, loss = run.step(params, state, jnp.ones((1, 2)))
      >>> print(loss < 0.2)
      True

    References:
      Li et al., 1-bit LAMB, 2021, https://arxiv.org/abs/2104.06069; You et al., Large
      batch optimization for deep learning, 2020, https://arxiv.org/abs/1904.00962,
      Algorithm 2.
    """
    rescale = scale_by_onebit_lamb(
        exchange,
        freeze,
        b1,
        b2,
        eps,
        weight_decay,
        mask,
        bias_correction=bias_correction,
        ratio_limits=ratio_limits,
        ratio_decay=ratio_decay,
        factor_limits=factor_limits,
        factor_change=factor_change,
        compressed=compressed,
    )
    warn_if_rising(learning_rate, freeze)
    return optax.chain(rescale, optax.scale_by_learning_rate(learning_rate))
