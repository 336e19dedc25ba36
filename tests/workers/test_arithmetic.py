"""What orders collectives is no constant to XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.workers.arithmetic import ordered_after


@pytest.mark.parametrize(
    "first", [0.0, -0.0, 1.0, -2.5, 1e-40, np.inf, -np.inf, np.nan], ids=str
)
def test_a_value_stays_whatever_comes_before_it(first):
    tree = {"a": jnp.full(3, first), "b": jnp.full((2, 2), first, jnp.bfloat16)}
    assert ordered_after(jnp.int32(7), tree) == 7
    assert ordered_after(jnp.int32(7), {"a": jnp.zeros(0)}) == 7


def test_xla_computes_it_from_the_values():
    """Folded, programs read from JAX's compilation cache end in a segmentation fault.

    Their collectives in branches are ordered by what they depend on alone.
    """
    tree = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    compiled = jax.jit(lambda tree: ordered_after(jnp.int32(0), tree)).lower(tree)
    text = compiled.compile().as_text()
    (root,) = (
        line for line in text[text.index("ENTRY") :].splitlines() if "ROOT" in line
    )
    assert "constant" not in root.partition("metadata")[0]
