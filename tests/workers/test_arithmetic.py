"""The zero that orders collectives is no constant to XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.workers.arithmetic import zero_after


@pytest.mark.parametrize(
    "first", [0.0, -0.0, 1.0, -2.5, 1e-40, np.inf, -np.inf, np.nan], ids=str
)
def test_what_comes_after_values_is_zero(first):
    tree = {"a": jnp.full(3, first), "b": jnp.full((2, 2), first, jnp.bfloat16)}
    assert zero_after(tree) == 0
    assert zero_after({"a": jnp.zeros(0)}) == 0


def test_xla_computes_it_from_the_values():
    """Folded, programs read from JAX's compilation cache end in a segmentation fault.

    Their collectives in branches are ordered by what they depend on alone.
    """
    tree = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    text = jax.jit(zero_after).lower(tree).compile().as_text()
    (root,) = (
        line for line in text[text.index("ENTRY") :].splitlines() if "ROOT" in line
    )
    assert "constant" not in root.partition("metadata")[0]
