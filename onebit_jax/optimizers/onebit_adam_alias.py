"""1-bit Adam and AdamW, ready to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optax

from onebit_jax.optimizers.onebit_adam import (
    GROWTH,
    LEAD,
    scale_by_onebit_adam,
)
from onebit_jax.optimizers.parts.bound import BOUND
from onebit_jax.optimizers.parts.floor import FLOOR
from onebit_jax.optimizers.parts.freeze import warn_if_rising

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.typing import ArrayLike

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.optimizers.onebit_adam_stages import Send
    from onebit_jax.optimizers.parts.floor import FloorAtMean
    from onebit_jax.optimizers.parts.freeze import FreezeRule
    from onebit_jax.optimizers.parts.growth import GrowthByMeanSquares
    from onebit_jax.optimizers.parts.intervals import IntervalRule


def onebit_adam(
    learning_rate: optax.ScalarOrSchedule,
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
    r"""1-bit Adam: Adam until the variance is stable, then one bit a parameter.

    .. math:: p_t = p_{t-1} - \alpha_t u_t

    with :math:`u_t` of `scale_by_onebit_adam`. Before the freeze it is
    `optax.adam` on the exact mean of the workers' gradients. After it, lead, growth,
    floor and bound are not in the paper: `**onebit_jax.AS_PUBLISHED` leaves them out.

    Args:
      learning_rate: a number, or a schedule from the step.
      exchange: what workers do after the freeze with their momenta, or with
        `send='gradient'` their gradients, such as `onebit_jax.sign_mean('data')`.
      freeze: when the variance is frozen, such as `onebit_jax.freeze_at(1000)`.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the root of the variance.
      bias_correction: whether both moments are corrected for their start from zero.
      warmup_exchange: what workers do with their gradients in the warm-up; None for
        the exact mean.
      refresh: which steps of the warm-up are Adam's; None for all. With it, floor,
        bound and, in the steps between, lead act in the warm-up too.
      send: what is exchanged after the freeze, 'gradient' or 'momentum'.
      lead: steps by which the momentum is extrapolated, as error feedback delays it.
      growth: how the frozen variance grows with the gradients.
      floor: how variances near zero are raised at the freeze.
      bound: the largest update of a coordinate after the freeze.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with
      each worker's own gradients; `onebit_jax.data_parallel` does so.

    Raises:
      TypeError, ValueError: as `scale_by_onebit_adam` does.

    Warns:
      UserWarning: if the variance may be frozen while the learning rate still rises.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.onebit_adam(
      ...     0.1, onebit_jax.sign_mean('data'), onebit_jax.freeze_at(5)
      ... )
      >>> def loss_fn(p, x):
      ...     return jnp.mean((x @ (p - 1)) ** 2)
      >>> run = onebit_jax.data_parallel(loss_fn, tx, mesh)
      >>> params, state = run.init(jnp.zeros(2))
      >>> for _ in range(30):
      ...     params, state, loss = run.step(params, state, jnp.ones((1, 2)))
      >>> print(loss < 0.2)
      True

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888,
      Algorithm 1.
    """
    rescale = scale_by_onebit_adam(
        exchange,
        freeze,
        b1,
        b2,
        eps,
        bias_correction=bias_correction,
        warmup_exchange=warmup_exchange,
        refresh=refresh,
        send=send,
        lead=lead,
        growth=growth,
        floor=floor,
        bound=bound,
    )
    warn_if_rising(learning_rate, freeze)
    return optax.chain(
        rescale,
        optax.scale_by_learning_rate(learning_rate),
    )


def onebit_adamw(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    freeze: FreezeRule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
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
    r"""1-bit Adam with decoupled weight decay.

    .. math:: p_t = p_{t-1} - \alpha_t (u_t + \lambda p_{t-1})

    with :math:`u_t` of `scale_by_onebit_adam`. Before the freeze it is
    `optax.adamw` on the exact mean of the workers' gradients. After it, lead, growth,
    floor and bound are not in the paper: `**onebit_jax.AS_PUBLISHED` leaves them out.

    Args:
      learning_rate: a number, or a schedule from the step.
      exchange: what workers do after the freeze with their momenta, or with
        `send='gradient'` their gradients, such as `onebit_jax.sign_mean('data')`.
      freeze: when the variance is frozen, such as `onebit_jax.freeze_at(1000)`.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the root of the variance.
      weight_decay: λ. As in `optax.adamw`, it is multiplied by the learning rate.
      mask: a tree of booleans like the parameters', or a function from parameters
        to one, that says which leaves decay; None for all.
      bias_correction: whether both moments are corrected for their start from zero.
      warmup_exchange: what workers do with their gradients in the warm-up; None for
        the exact mean.
      refresh: which steps of the warm-up are Adam's; None for all. With it, floor,
        bound and, in the steps between, lead act in the warm-up too.
      send: what is exchanged after the freeze, 'gradient' or 'momentum'.
      lead: steps by which the momentum is extrapolated, as error feedback delays it.
      growth: how the frozen variance grows with the gradients.
      floor: how variances near zero are raised at the freeze.
      bound: the largest update of a coordinate after the freeze.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with
      each worker's own gradients and the parameters.

    Raises:
      TypeError, ValueError: as `scale_by_onebit_adam` does.

    Warns:
      UserWarning: if the variance may be frozen while the learning rate still rises.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.onebit_adamw(
      ...     0.1,
      ...     onebit_jax.sign_mean('data'),
      ...     onebit_jax.freeze_at(1),
      ...     weight_decay=1.0,
      ... )
      >>> batch = jnp.array([[3.0, -5.0], [1.0, -1.0]])  # a line a worker
      >>> run = onebit_jax.simulated(lambda p, x: jnp.mean(x @ p), tx, workers=2)
      >>> params, state = run.init(jnp.ones(2))
      >>> for _ in range(2):
      ...     params, state, loss = run.step(params, state, batch)
      >>> print(params.round(3))
      [0.62 1.  ]

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888;
      Loshchilov and Hutter, Decoupled weight decay regularization, 2019,
      https://arxiv.org/abs/1711.05101.
    """
    rescale = scale_by_onebit_adam(
        exchange,
        freeze,
        b1,
        b2,
        eps,
        bias_correction=bias_correction,
        warmup_exchange=warmup_exchange,
        refresh=refresh,
        send=send,
        lead=lead,
        growth=growth,
        floor=floor,
        bound=bound,
    )
    warn_if_rising(learning_rate, freeze)
    return optax.chain(
        rescale,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
