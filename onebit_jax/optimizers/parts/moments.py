"""Arithmetic on moments that optimizers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    import optax
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32, Int32


def as_float32(x: ArrayLike) -> float | Float32[Array, ""]:
    """A hyperparameter for arithmetic in float32.

    Python numbers stay weakly typed: Optax's arithmetic to the last bit. Others, such
    as inject_hyperparams' arrays in the parameters' dtype, are promoted. What bfloat16
    has rounded stays so: 0.999 is 1 there, unless `hyperparam_dtype` is float32.

    Raises:
      ValueError: if it is more than one number, such as a pair of decays.
    """
    # NumPy's float64 is a float, and no weak type.
    if isinstance(x, (int, float)) and not isinstance(x, np.generic):
        return x
    number = jnp.asarray(x, jnp.float32)
    if number.shape:
        raise ValueError(
            f"b1, b2, eps and the like are one number each, got {x!r}: give a pair of "
            "decays as b1 and b2."
        )
    return number


def weight(decay: ArrayLike, steps: Int32[Array, ""]) -> Array:
    r"""The weight of all values so far in a running mean that began at zero.

    .. math:: 1 - \beta^t

    Args:
      decay: :math:`\beta`.
      steps: t, how many values there have been.

    Returns:
      A scalar.

    Example:
      >>> print(weight(0.5, jnp.int32(2)))
      0.75
    """
    return jnp.asarray(1 - decay ** steps.astype(jnp.float32))


def divide_by_weight(
    moment: optax.Params, decay: ArrayLike, steps: Int32[Array, ""]
) -> optax.Params:
    """A running mean that began at zero, corrected for it: Adam's bias correction."""
    divisor = weight(decay, steps)
    return jax.tree.map(lambda m: m / divisor, moment)
