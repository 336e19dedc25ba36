"""Nodes of a state, found by an attribute that they have."""

from __future__ import annotations

from typing import Any

import jax


def nodes_with(state: Any, attribute: str) -> list[Any]:
    """The nodes of a state that have an attribute, those inside one another too."""

    def has(node: Any) -> bool:
        return node is not state and has_attribute(node, attribute)

    nodes = [x for x in jax.tree.leaves(state, is_leaf=has) if has(x)]
    return nodes + [deeper for node in nodes for deeper in nodes_with(node, attribute)]


def has_attribute(node: Any, attribute: str) -> bool:
    """True of a named tuple that has an attribute which is none of its fields.

    As the states of Optax are. Moments are of the classes of the user's parameters,
    which are seldom named tuples, and whose fields and methods may be called the same.
    """
    kind = type(node)
    return hasattr(kind, "_fields") and (
        attribute not in kind._fields and hasattr(kind, attribute)
    )
