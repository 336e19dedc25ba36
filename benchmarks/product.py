"""The matrix product whose rate is a device's peak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = {"cpu": 2048, "gpu": 8192}
"""Rows and columns of its factors, by platform."""


def product(dtype: str, platform: str) -> tuple[int, Callable[[], Any]]:
    """The square matrix product whose rate is the peak.

    Args:
      dtype: Dtype of its factors and its result.
      platform: 'cpu' or 'gpu'.

    Returns:
      Its rows and columns, and a function that starts it.
    """
    size = SIZE.get(platform, SIZE["gpu"])
    # Not zeros, which a GPU multiplies with less power and so at a higher clock.
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), jnp.dtype(dtype)) for key in keys)
    multiply = jax.jit(jnp.matmul)
    return size, lambda: multiply(a, b)
