"""A number a layer: norms, factors, and the factors that make momenta alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from onebit_jax.workers.arithmetic import replicated

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32

    from onebit_jax.exchanges.exchange import Exchange

# A layer whose momentum is below this share of the layers' mean magnitude is not
# scaled: its later gradients would be scaled far above all others', or beyond float32.
_NEGLIGIBLE = 1e-6


def of_layers(
    function: Callable[..., Float32[Array, ""]], *trees: Any
) -> Float32[Array, " layers"]:
    """A number of each layer, from its leaf of one or several trees.

    Args:
      function: from leaves of the same place to a float32 number.
      *trees: of the same structure.

    Returns:
      The numbers, in the order of the leaves.

    Example:
      >>> print(of_layers(jnp.max, {'a': jnp.ones(3), 'b': jnp.zeros(2)}))
      [1. 0.]
    """
    leaves = zip(*map(jax.tree.leaves, trees), strict=True)
    numbers = [function(*each) for each in leaves]
    return replicated(jnp.stack(numbers)) if numbers else jnp.zeros(0, jnp.float32)


def times(factors: Float32[Array, " layers"], tree: Any) -> Any:
    """Each layer of a tree times its factor, in float32.

    Example:
      >>> times(jnp.array([2.0, 3.0]), {'a': jnp.ones(2), 'b': jnp.ones(1)})
      {'a': Array([2., 2.], dtype=float32), 'b': Array([3.], dtype=float32)}
    """
    leaves, treedef = jax.tree.flatten(tree)
    scaled = [factors[i] * x.astype(jnp.float32) for i, x in enumerate(leaves)]
    return treedef.unflatten(scaled)


def norms(tree: Any) -> Float32[Array, " layers"]:
    """The 2-norm of each layer."""
    return of_layers(lambda x: jnp.sqrt(jnp.sum(jnp.square(x))), tree)


def equal_magnitudes(momentum: optax.Params) -> Float32[Array, " layers"]:
    r"""Factors that bring the momenta of all layers to one magnitude.

    .. math::
      s_l = \frac{1}{\mathrm{rms}(m_l)} \frac1L \sum_k \mathrm{rms}(m_k)

    over the L layers that have a momentum; 1 for a layer with less than a millionth of
    the mean.

    Args:
      momentum: m, float32.

    Returns:
      s, positive and finite.

    Example:
      >>> print(equal_magnitudes([jnp.full(4, 1.0), jnp.full(2, 3.0), jnp.zeros(5)]))
      [2.        0.6666667 1.       ]

    References:
      Li et al., 1-bit LAMB, 2021, https://arxiv.org/abs/2104.06069; the scaling
      coefficients of DeepSpeed 0.19.6, `runtime/fp16/onebit/lamb.py`.
    """
    sizes = of_layers(lambda m: jnp.float32(max(m.size, 1)), momentum)
    magnitudes = norms(momentum) / jnp.sqrt(sizes)
    number = jnp.sum(magnitudes > 0, dtype=jnp.float32)
    mean = jnp.sum(magnitudes) / jnp.maximum(number, 1)
    known = magnitudes > _NEGLIGIBLE * mean
    return jnp.where(known, mean / jnp.where(known, magnitudes, 1), 1)


def exchange_scaled_momentum(
    exchange: Exchange,
    factors: Float32[Array, " layers"],
    gradients: optax.Updates,
    momentum: optax.Params,
    decay: ArrayLike,
    state: Any,
) -> tuple[optax.Updates, Any]:
    r"""Exchanges a momentum with each layer scaled, and scales it back.

    .. math:: E[\beta s m + (1 - \beta) s g^{(i)}] / s

    An exchange that has one scale for values of several layers loses the small ones
    of layers that are not alike. Its errors are those of scaled values.

    Args:
      exchange: E.
      factors: s, the same on all workers and in all steps.
      gradients: :math:`g^{(i)}`, each worker's own.
      momentum: m, float32, the same on all workers.
      decay: :math:`\beta`.
      state: of the exchange.

    Returns:
      The agreed momentum, float32, and the state of the exchange.
    """
    agreed, state = exchange.exchange_momentum(
        times(factors, gradients), times(factors, momentum), decay, state
    )
    return times(1 / factors, agreed), state
