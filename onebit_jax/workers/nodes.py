"""Nodes of a state, found by an attribute that they have."""

from __future__ import annotations

from typing import Any

import jax


def nodes_with(state: Any, attribute: str) -> list[Any]:
    """The nodes of a state that have an attribute, those inside one another too."""

    def has(node: Any) -> bool:
        return node is not state and hasattr(node, attribute)

    nodes = [x for x in jax.tree.leaves(state, is_leaf=has) if has(x)]
    return nodes + [deeper for node in nodes for deeper in nodes_with(node, attribute)]
