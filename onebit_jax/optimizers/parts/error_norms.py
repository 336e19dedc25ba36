"""Norms of an exchange's errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from onebit_jax.workers.arithmetic import squared_norm
from onebit_jax.workers.worker_local import worker_local_nodes

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32


def error_norms(exchange: Any, momentum: Any) -> dict[str, Float32[Array, ""]]:
    r"""Norms of errors over the momentum's: workers' root mean square, and servers'.

    .. math::
      \sqrt{\tfrac1n \textstyle\sum_i \|\delta^{(i)}\|^2} / \|m\|, \quad
      \|\bar\delta\| / \|m\|

    Args:
      exchange: state of an exchange, global arrays.
      momentum: m, as it is exchanged.

    Returns:
      'worker_error' and 'server_error'; not divided while the momentum is zero.
    """
    errors = worker_local_nodes(exchange)
    worker = [e.value for e in errors if e.resizing == "average"]
    server = [e.value for e in errors if e.resizing == "concatenate"]
    # Each worker has its own worker errors; all server errors are one tree's.
    squares = {
        "worker_error": sum(
            (squared_norm(x) / x.shape[0] for x in jax.tree.leaves(worker)),
            start=jnp.float32(0),
        ),
        "server_error": squared_norm(server),
    }
    norm = jnp.sqrt(squared_norm(momentum))
    divisor = jnp.where(norm > 0, norm, 1)
    return {name: jnp.sqrt(square) / divisor for name, square in squares.items()}
