"""The loss that all heads share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "*shape classes"], labels: Int[Array, " *shape"]
) -> Float[Array, " *shape"]:
    """The negative log-likelihood of each label: log Σ exp(logits) - logits[label].

    Args:
      logits: Scores, the classes last.
      labels: The right class of each.

    Returns:
      An array like `labels`, in nats.

    Example:
      >>> import jax.numpy as jnp
      >>> from models.losses import cross_entropy
      >>> cross_entropy(jnp.zeros((1, 2)), jnp.array([1])) == jnp.log(2.0)
      Array([ True], dtype=bool)
    """
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
