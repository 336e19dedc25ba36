"""The order of collectives, which XLA must not see as a constant."""

import re

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


@pytest.mark.parametrize("leaves", [2, 70])
def test_xla_computes_it_from_every_value(leaves):
    """Folded, programs read from JAX's compilation cache end in a segmentation fault.

    Their collectives in branches are ordered by what they depend on alone.
    """
    tree = [jnp.ones(2 + i % 3) for i in range(leaves)]
    compiled = jax.jit(lambda tree: ordered_after(jnp.int32(0), tree)).lower(tree)
    text = compiled.compile().as_text()
    (root,) = (
        line for line in text[text.index("ENTRY") :].splitlines() if "ROOT" in line
    )
    assert "constant" not in root.partition("metadata")[0]
    # An argument that is not read has no parameter.
    read = re.findall(r"parameter\((\d+)\)", text[text.index("ENTRY") :])
    assert len(set(read)) == leaves
