"""Layers whose activations the backward pass computes again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from collections.abc import Callable

    from models.config import Remat

_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "layer": jax.checkpoint_policies.nothing_saveable,
}


def recomputed(
    run: Callable[..., Any], remat: Remat, *, in_loop: bool = False
) -> Callable[..., Any]:
    """A layer, of which the backward pass computes again what `remat` says.

    Args:
      run: Its first argument is static, the layer's graph.
      remat: As of `models.config.TransformerConfig`.
      in_loop: Whether it is the body of a loop.

    Returns:
      A function like `run`.
    """
    if remat not in _POLICIES:
        return run
    # A loop's body is compiled once for forward and once for backward, so that
    # nothing could undo the recomputation; barriers would only hinder fusion.
    return jax.checkpoint(
        run, static_argnums=0, policy=_POLICIES[remat], prevent_cse=not in_loop
    )
