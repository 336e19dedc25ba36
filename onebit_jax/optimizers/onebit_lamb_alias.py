"""1-bit LAMB, ready to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optax

from onebit_jax.optimizers.onebit_lamb import scale_by_onebit_lamb
from onebit_jax.optimizers.parts.bound import BOUND
from onebit_jax.optimizers.parts.floor import FLOOR
from onebit_jax.optimizers.parts.freeze import warn_if_rising

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.typing import ArrayLike

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.optimizers.parts.floor import FloorAtMean
    from onebit_jax.optimizers.parts.freeze import FreezeRule


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
    floor: FloorAtMean | None = FLOOR,
    bound: ArrayLike | None = BOUND,
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
      floor: how variances near zero are raised at the freeze.
        `**onebit_jax.LAMB_AS_PUBLISHED` leaves it and the bound out.
      bound: the largest update of a coordinate after the freeze, before weight decay
        and ratio.

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
        floor=floor,
        bound=bound,
    )
    warn_if_rising(learning_rate, freeze)
    return optax.chain(
        rescale,
        optax.scale_by_learning_rate(learning_rate),
    )
