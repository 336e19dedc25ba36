"""LAMB's ratio of norms, and a factor that follows it when it is frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from onebit_jax.optimizers.parts.layers import norms, of_layers

if TYPE_CHECKING:
    import optax
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32


def trust_ratio(
    params: optax.Params, update: optax.Updates, limits: tuple[float, float]
) -> Float32[Array, " layers"]:
    r"""LAMB's ratio of each layer.

    .. math:: c = \mathrm{clip}(\|p\| / \|u\|, c_{min}, c_{max})

    Args:
      params: p, float32.
      update: u, before the learning rate.
      limits: :math:`c_{min}` and :math:`c_{max}`.

    Returns:
      c; 1, whatever the limits, where a norm is zero.

    Example:
      >>> params = {'a': jnp.full(4, 3.0), 'b': jnp.zeros(4)}
      >>> update = {'a': jnp.ones(4), 'b': jnp.ones(4)}
      >>> print(trust_ratio(params, update, limits=(0, 2)))
      [2. 1.]
    """
    of_params, of_update = norms(params), norms(update)
    both = (of_params > 0) & (of_update > 0)
    ratio = of_params / jnp.where(both, of_update, 1)
    return jnp.where(both, jnp.clip(ratio, *limits), 1)


def next_factor(
    last: Float32[Array, " layers"],
    frozen: optax.Params,
    fresh: optax.Params,
    *,
    direction: optax.Updates,
    update: optax.Updates,
    limits: tuple[float, float],
    change: ArrayLike,
) -> Float32[Array, " layers"]:
    r"""The factor on each layer's frozen ratio, from what its variance has become.

    .. math::
      r_t = \mathrm{clip}\left(1 - \rho + \rho \max_j
      \frac{\sqrt{v_j} + \epsilon}{\sqrt{w_j} + \epsilon}, r_{min}, r_{max}\right),
      \quad \rho = \min\left(1, \frac{\|d\|}{\|u\|}\right)

    and then :math:`\mathrm{clip}(r_t, (1 \pm \gamma) r_{t-1})`.

    Args:
      last: :math:`r_{t-1}`.
      frozen: the divisors by the frozen variance, :math:`\sqrt v + \epsilon`.
      fresh: those by the variance of now, :math:`\sqrt w + \epsilon`.
      direction: d, the update without weight decay.
      update: u, with it.
      limits: :math:`r_{min}` and :math:`r_{max}`.
      change: :math:`\gamma`.

    Returns:
      :math:`r_t`. An update of zeros has a share :math:`\rho` of 1.
    """
    of_direction, of_update = norms(direction), norms(update)
    some = of_update > 0
    share = of_direction / jnp.where(some, of_update, 1)
    share = jnp.where(some, jnp.minimum(share, 1), 1)
    largest = of_layers(lambda v, w: jnp.max(v / w, initial=0.0), frozen, fresh)
    factor = jnp.clip(1 - share + share * largest, *limits)
    return jnp.clip(factor, last * (1 - change), last * (1 + change))
