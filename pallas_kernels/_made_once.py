"""A value that XLA makes once, and reads wherever it is used."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def made_once(tree: Any) -> Any:
    """Small values that much else is computed from, made once.

    XLA's CPU backend would compute them again in every kernel that uses them: to
    compile that takes time that grows with the square of their number, and a kernel
    that reads parts of several large arrays is not vectorised.

    Args:
      tree: arrays.

    Returns:
      The same arrays.

    Example:
      >>> print(made_once(jnp.arange(3)))
      [0 1 2]
    """

    def through_a_loop(tree: Any) -> Any:
        # Hidden from the compiler, which removes a loop that runs once.
        once = lax.optimization_barrier(jnp.int32(1))

        def same(i: Any, tree: Any) -> Any:
            never = i < 0
            return jax.tree.map(lambda x: lax.select(never, jnp.zeros_like(x), x), tree)

        return lax.fori_loop(0, once, same, tree)

    return lax.platform_dependent(
        tree, cpu=through_a_loop, default=lax.optimization_barrier
    )
