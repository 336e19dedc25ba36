"""The two forms of a tree of parameters: a layer each, or all layers stacked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def stack_layers(params: Any) -> Any:
    """Parameters for `BertConfig(scan=True)` from those of a layer each.

    Args:
      params: Nested dictionaries. One has the key `layers`, under which each layer's
        number, from 0 on, is the key of that layer's parameters. Gradients and moments
        of the same form are stacked likewise.

    Returns:
      The same dictionaries, but under `layers` one tree for all layers together: each
      leaf has a new first axis, along which the layers are counted.

    Example:
      >>> import jax.numpy as jnp
      >>> from models import stack_layers, unstack_layers
      >>> params = {"layers": {0: {"scale": jnp.ones(3)}, 1: {"scale": jnp.zeros(3)}}}
      >>> stack_layers(params)["layers"]["scale"].shape
      (2, 3)
      >>> unstack_layers(stack_layers(params))["layers"][1]["scale"].tolist()
      [0.0, 0.0, 0.0]
    """

    def stack(layers: dict[int, Any]) -> Any:
        trees = [layers[number] for number in sorted(layers)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    return _at_layers(params, stack)


def unstack_layers(params: Any) -> Any:
    """The inverse of `stack_layers`."""

    def unstack(layers: Any) -> dict[int, Any]:
        number = jax.tree.leaves(layers)[0].shape[0]
        return {i: jax.tree.map(lambda x, i=i: x[i], layers) for i in range(number)}

    return _at_layers(params, unstack)


def _at_layers(tree: Any, change: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {
        name: change(branch) if name == "layers" else _at_layers(branch, change)
        for name, branch in tree.items()
    }
