"""Whatever is recomputed, the numbers are the same; what is kept is not."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import SIZES, Encoder
from models.dropout import sequence_keys

CONFIG = dataclasses.replace(
    SIZES["tiny"],
    vocab_size=50,
    hidden_size=32,
    intermediate_size=64,
    max_positions=64,
)
POLICIES = ("none", "attention", "dots", "layer")
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 50, (2, 64), np.int32))


def loss(config):
    graph, state = nnx.split(Encoder(config, rngs=nnx.Rngs(0)))

    def loss(state):
        keys = sequence_keys(jax.random.key(1), jnp.arange(2))
        lengths = jnp.array([64, 23])
        hidden = nnx.merge(graph, state).encode(TOKENS, TOKENS % 2, lengths, keys)
        return jnp.sum(jnp.sin(hidden))

    return loss, nnx.to_pure_dict(state)


def test_values_and_gradients_are_the_same():
    results = {}
    # "layer" is compared in test_bert_scan.
    for remat in ("none", "attention", "dots"):
        function, state = loss(dataclasses.replace(CONFIG, remat=remat, scan=True))
        results[remat] = jax.jit(jax.value_and_grad(function))(state)
    value, gradients = results.pop("none")
    for own_value, own_gradients in results.values():
        assert own_value == pytest.approx(float(value), rel=1e-6)
        chex.assert_trees_all_close(own_gradients, gradients, rtol=2e-5, atol=2e-5)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize(
    ("pre_norm", "recomputed"),
    # Scores; their product with the values too, which the output's gradient needs; all
    # six products, but for pre-LayerNorm's last, which is only added up.
    [(False, (0, 1, 2, 6)), (True, (0, 1, 2, 5))],
)
def test_recomputes_these_products_of_each_layer(pre_norm, recomputed):
    products = []
    for remat in POLICIES:
        config = dataclasses.replace(
            CONFIG, remat=remat, pre_norm=pre_norm, dropout=0.0, scan=True
        )
        function, state = loss(config)
        jaxpr = jax.make_jaxpr(jax.grad(function))(state).jaxpr
        names = [equation.primitive.name for equation in equations(jaxpr)]
        products.append(names.count("dot_general"))
    assert tuple(n - products[0] for n in products) == recomputed
    assert products[0] == 6 + 12


@pytest.mark.parametrize("scan", [False, True])
def test_keeps_less_the_more_it_recomputes(scan):
    kept = {}
    for remat in POLICIES:
        config = dataclasses.replace(CONFIG, remat=remat, scan=scan)
        function, state = loss(config)
        _, pullback = jax.eval_shape(lambda s, f=function: jax.vjp(f, s), state)
        kept[remat] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))
    print(kept)
    sizes = list(kept.values())
    assert sizes == sorted(sizes, reverse=True)
    # The probabilities: heads · T² of each sequence and layer, in float32.
    probabilities = 4 * TOKENS.size * 64 * CONFIG.num_heads * CONFIG.num_layers
    assert kept["none"] - kept["attention"] >= probabilities
    assert kept["layer"] < 0.6 * kept["dots"]


def test_unknown_policies_are_refused():
    for remat in (True, "everything"):
        with pytest.raises(ValueError, match="remat is one of none, attention, dots"):
            dataclasses.replace(CONFIG, remat=remat)
