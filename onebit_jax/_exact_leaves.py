"""Leaves that are too small for a wire format, exchanged exactly and together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jax.typing import DTypeLike


def own_value(value: Array, momentum: Array | None, decay: Any) -> Array:
    """What a worker has to send, in float32: a value, or its running mean."""
    value = value.astype(jnp.float32)
    if momentum is None:
        return value
    return (1 - decay) * value + decay * momentum


def exact_means(
    leaves: Sequence[Array],
    momenta: Sequence[Any],
    decay: Any,
    dtypes: Sequence[DTypeLike],
    axes: tuple[str, ...],
) -> list[Array]:
    """The exact means of leaves, or of their running means, in one all-reduce."""
    local = [
        own_value(x, own, decay).reshape(-1)
        for x, own in zip(leaves, momenta, strict=True)
    ]
    if not local:
        return []
    mean = lax.pmean(jnp.concatenate(local), axes)
    result, start = [], 0
    for x, dtype in zip(leaves, dtypes, strict=True):
        part = mean[start : start + x.size]
        result.append(part.reshape(x.shape).astype(dtype))
        start += x.size
    return result
