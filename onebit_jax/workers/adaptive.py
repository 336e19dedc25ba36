"""A warning of Optax's adaptive optimizers behind an exchange of signs."""

from __future__ import annotations

import warnings
from typing import Any

import jax

from onebit_jax.workers.chains import chains
from onebit_jax.workers.worker_local import is_worker_local

_SECOND_MOMENTS = {
    "nu",
    "exp_avg_sq",
    "sum_of_squares",
    "grad_sum_sq",
    "n",
    "e_g",
    "v",
}
"""Names of the fields where Optax keeps second moments of what it was given."""


def warn_of_adaptive(state: Any) -> None:
    """Warns of second moments of values that have one magnitude a block, or a few.

    An exchange of signs tells so by an attribute of its state, `has_one_magnitude`.

    Args:
      state: an optimizer's state, or its shapes.

    Warns:
      UserWarning: if one of Optax's adaptive optimizers follows such an exchange.
    """
    for parts in chains(state):
        first = next((i for i, x in enumerate(parts) if _is_of_signs(x)), len(parts))
        if any(map(_is_adaptive, _leaves(parts[first + 1 :], _is_adaptive))):
            warnings.warn(
                "an adaptive optimizer follows an exchange of signs, which leaves one "
                "magnitude a block, or a few, so that its second moments do not tell "
                "coordinates apart: use onebit_jax.onebit_adam, or put "
                "quantized_mean(axis, 4) before it.",
                stacklevel=3,
            )


def _leaves(tree: Any, is_leaf: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_leaf)


def _is_adaptive(node: Any) -> bool:
    # Parameters may have fields of such names, too.
    of_optax = type(node).__module__.startswith("optax.")
    return of_optax and bool(_SECOND_MOMENTS & set(getattr(node, "_fields", ())))


def _is_of_signs(state: Any) -> bool:
    """True of the state of an exchange of signs, with nothing of an optimizer in it."""

    def is_exchange(node: Any) -> bool:
        return is_worker_local(node) or hasattr(node, "has_one_magnitude")

    nodes = _leaves(state, is_exchange)
    has_signs = any(hasattr(node, "has_one_magnitude") for node in nodes)
    return has_signs and all(map(is_exchange, nodes))
