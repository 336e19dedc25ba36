"""Float32 trees that each worker keeps for itself, as means of its own gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from onebit_jax.workers.axes import (
    bound_workers,
    check_floats,
    check_local,
    check_workers,
    worker_count,
)
from onebit_jax.workers.worker_local import WorkerLocal

if TYPE_CHECKING:
    import optax


def zero_moments(params: optax.Params, axes: tuple[str, ...], who: str) -> WorkerLocal:
    """Running means before any gradient.

    Args:
      params: parameters, or their shapes and dtypes.
      axes: the worker axes.
      who: the optimizer's name, for error messages.

    Returns:
      For each leaf zeros, (workers, *shape), float32.

    Raises:
      TypeError: if a leaf is not real floating-point.
      ValueError: if an axis is neither bound nor in the mesh in context.
    """
    _, slices = worker_count(axes)
    check_floats(params, who)
    zeros = jax.tree.map(lambda p: jnp.zeros((slices, *p.shape), jnp.float32), params)
    return WorkerLocal(zeros, axes, "average")


def own_moments(
    moments: WorkerLocal, gradients: optax.Updates, axes: tuple[str, ...], who: str
) -> optax.Params:
    """This worker's running means, for gradients that are its own.

    Args:
      moments: from `zero_moments`, or `as_own`.
      gradients: what they are running means of.
      axes: the worker axes.
      who: the optimizer's name, for error messages.

    Returns:
      A tree like the gradients, float32.

    Raises:
      TypeError: if a gradient is not real floating-point.
      ValueError: if gradients are averaged already, an axis is not bound, or the means
        are of other leaves or of another number of workers.
    """
    workers = bound_workers(axes)
    check_local(gradients, axes, who)
    leaves, treedef = jax.tree.flatten(gradients)
    means = treedef.flatten_up_to(moments.value)
    pairs = zip(means, leaves, strict=True)
    fits = all(mean.shape == (1, *g.shape) for mean, g in pairs)
    check_workers(fits, who, workers, axes)
    return jax.tree.map(lambda mean: mean[0], moments.value)


def as_own(means: optax.Params, axes: tuple[str, ...]) -> WorkerLocal:
    """New running means of this worker, for the state."""
    return WorkerLocal(jax.tree.map(lambda mean: mean[None], means), axes, "average")
