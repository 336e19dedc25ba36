"""The parameters that a worker's loss sees."""

from __future__ import annotations

from typing import Any


def local_params(params: Any, state: Any) -> Any:
    """The parameters at which a worker computes its loss.

    Parameters are the same on all workers. An optimizer whose workers take steps of
    their own between exchanges keeps what they add in its state; none does today, and
    the parameters are returned as they are.

    Args:
      params: the agreed parameters.
      state: the optimizer's state, inside `shard_map`.

    Returns:
      A tree like the parameters.
    """
    del state
    return params
