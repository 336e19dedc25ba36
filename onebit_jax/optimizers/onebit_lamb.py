"""1-bit LAMB: warm-up LAMB, the freeze, then one bit a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import optax

from onebit_jax.optimizers.onebit_lamb_stages import OnebitLamb
from onebit_jax.optimizers.parts.bound import BOUND
from onebit_jax.optimizers.parts.checks import check_parts
from onebit_jax.optimizers.parts.floor import FLOOR, FloorAtMean
from onebit_jax.optimizers.parts.moments import as_float32

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.typing import ArrayLike

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.optimizers.parts.freeze import FreezeRule


class LambParts(TypedDict):
    """The parts of the compressed stage that can be left out."""

    floor: FloorAtMean | None
    bound: ArrayLike | None


LAMB_AS_PUBLISHED: LambParts = {"floor": None, "bound": None}
"""The parts of the paper's compressed stage: a frozen variance as it is, no bound.

The step of values that had no gradients in the warm-up is the scale / eps.
"""


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
    floor: FloorAtMean | None = FLOOR,
    bound: ArrayLike | None = BOUND,
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
    (`**LAMB_AS_PUBLISHED`) and without bias correction it is the paper's.

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
      floor: what becomes of variances near zero at the freeze; None to leave them.
      bound: B, the largest :math:`d` of a coordinate after the freeze; None for none.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with
      each worker's own gradients and the parameters. Moments are float32 whatever the
      parameters are; updates have the gradients' dtype. `update` takes one extra
      argument, `stage`: None (default) compiles both stages into one program that
      chooses by the state; 'warmup' or 'compressed' compiles one. A 'warmup' step
      with a frozen variance exchanges exactly and leaves it frozen; a compressed step
      with a variance that is not frozen freezes it as it is.

    Raises:
      TypeError: if an argument is not of its type, or the exchange returns votes.
      ValueError: if limits are not in order, a decay or a change is out of range, the
        bound is not more than 0, or, from `update`, without parameters.

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
    check_parts("1-bit LAMB", exchange, freeze, floor, bound)
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
    lamb = OnebitLamb(
        exchange=exchange,
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
        floor=floor,
        bound=bound,
    )
    init: Any = lamb.init
    return optax.GradientTransformationExtraArgs(init, lamb.update)


def _floats(limits: tuple[float, float]) -> tuple[float, float]:
    # NumPy's float64 would make float64 of what it meets.
    low, high = limits
    return float(low), float(high)
