"""Gradients of a sum of losses, one part after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Float


def accumulated(
    loss_fn: Callable[..., Float[Array, ""]], parts: int
) -> Callable[..., Float[Array, ""]]:
    """Σ loss(params, part), whose gradient is computed beside it, part by part.

    Only one part's activations are held at a time. Differentiating a loop over the
    parts would hold all of them, or compute each forward pass twice.

    Args:
      loss_fn: From parameters, a part of the examples, and constants to a loss. Only
        the parameters are differentiated with respect to.
      parts: Into how many equal parts the examples are divided along their first axis,
        in their order.

    Returns:
      A function from parameters, all examples, and constants to the sum of the losses;
      it and its gradient are summed in float32.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from train.core.accumulation import accumulated
      >>> loss_fn = accumulated(lambda p, x, c: jnp.sum(p * x**2) / c, 3)
      >>> jax.value_and_grad(loss_fn)(jnp.float32(2), jnp.arange(6.0), 5.0)
      (Array(22., dtype=float32), Array(11., dtype=float32))
    """

    def loss_and_gradient(params: Any, examples: Any, constants: Any) -> Any:
        divided = jax.tree.map(
            lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), examples
        )

        def add(total: Any, part: Any) -> tuple[Any, None]:
            one = jax.value_and_grad(loss_fn)(params, part, constants)
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, one), None

        one = jax.eval_shape(
            lambda part: jax.value_and_grad(loss_fn)(params, part, constants),
            jax.tree.map(lambda x: x[0], divided),
        )
        return jax.lax.scan(add, jax.tree.map(_zeros, one), divided)[0]

    @jax.custom_vjp
    def total(params: Any, examples: Any, constants: Any) -> Float[Array, ""]:
        return loss_and_gradient(params, examples, constants)[0]

    def forward(params: Any, examples: Any, constants: Any) -> Any:
        loss, gradient = loss_and_gradient(params, examples, constants)
        return loss, jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params)

    def backward(gradient: Any, cotangent: Float[Array, ""]) -> Any:
        scaled = jax.tree.map(lambda g: g * cotangent.astype(g.dtype), gradient)
        return scaled, None, None

    total.defvjp(forward, backward)
    return total


def _zeros(like: jax.ShapeDtypeStruct) -> Array:
    """Zeros that vary over the mesh axes that what is added to them varies over."""
    zeros = jnp.zeros(like.shape, jnp.float32)
    kind = like.manual_axis_type  # none outside of shard_map
    return jax.lax.pcast(zeros, tuple(kind.varying) if kind else (), to="varying")
