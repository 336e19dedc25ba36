"""The parameters that a worker's loss sees."""

from __future__ import annotations

from typing import Any

from onebit_jax.workers.nodes import nodes_with


def local_params(params: Any, state: Any) -> Any:
    r"""The parameters at which a worker computes its loss.

    .. math:: p^{(i)} = p + d^{(i)}

    Parameters are the same on all workers. An optimizer whose workers take steps of
    their own between exchanges keeps what they add, :math:`d^{(i)}`, in its state: a
    named tuple with a method `local_params`, from the parameters to the worker's own.

    Args:
      params: the agreed parameters.
      state: the optimizer's state; inside `shard_map`, where it is one worker's, or
        with the arrays of all workers, whose mean is then added, as for an evaluation.

    Returns:
      A tree like the parameters.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.zero_one_adam(
      ...     1e-3, onebit_jax.sign_mean('data'), onebit_jax.freeze_at(10))
      >>> params = jnp.ones(3)
      >>> print(local_params(params, onebit_jax.init(tx, params, mesh)))
      [1. 1. 1.]
    """
    for node in nodes_with((state,), "local_params"):
        params = node.local_params(params)
    return params
