"""A loop over stacked layers, recomputed or not, is the same model.

What is computed again are the products that the names of the policies say."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models import (
    SIZES,
    BertForPreTraining,
    Encoder,
    PreTrainingBatch,
    pretraining_losses,
    stack_layers,
    unstack_layers,
)
from models.dropout import sequence_keys

CONFIG = dataclasses.replace(
    SIZES["tiny"],
    vocab_size=101,
    hidden_size=32,
    num_layers=3,
    intermediate_size=48,
    max_positions=16,
)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 101, (2, 8), np.int32))


def model(config):
    return BertForPreTraining(config, rngs=nnx.Rngs(5))


def parameters(config):
    return nnx.to_pure_dict(nnx.state(model(config), nnx.Param))


def batch():
    random = np.random.default_rng(3)
    tokens = random.integers(0, 101, (2, 8), dtype=np.int32)
    return jax.tree.map(
        jnp.asarray,
        PreTrainingBatch(
            token_ids=tokens,
            token_types=(tokens % 2).astype(np.int32),
            lengths=np.array([8, 5], np.int32),
            masked_positions=np.array([[1, 4], [2, 0]], np.int32),
            masked_labels=tokens[:, :2],
            masked_weights=np.array([[1, 1], [1, 0]], np.float32),
            next_sentence_labels=np.array([0, 1], np.int32),
        ),
    )


def loss_and_gradients(config, params):
    graph = nnx.graphdef(nnx.eval_shape(lambda: model(config)))

    def loss(params):
        keys = sequence_keys(jax.random.key(7), jnp.arange(2))
        return sum(
            pretraining_losses(*nnx.merge(graph, params)(batch(), keys), batch())
        )

    return jax.jit(jax.value_and_grad(loss))(params)


@functools.cache
def plain():
    """Parameters, loss and gradients of the layers as they are written."""
    params = parameters(CONFIG)
    return params, *loss_and_gradients(CONFIG, params)


def assert_is_plain(loss, gradients):
    _, expected, expected_gradients = plain()
    assert loss == pytest.approx(float(expected), rel=1e-6)
    chex.assert_trees_all_close(
        unstack_layers(gradients), expected_gradients, rtol=2e-5, atol=2e-6
    )


@pytest.mark.slow
def test_a_loop_that_is_computed_again_is_the_same_model():
    """With dropout; without, Hugging Face's numbers are those of a loop too."""
    config = dataclasses.replace(CONFIG, scan=True, remat="layer")
    own = parameters(config)
    chex.assert_trees_all_equal(own, stack_layers(plain()[0]))
    assert_is_plain(*loss_and_gradients(config, own))


@pytest.mark.slow
def test_with_sharded_parameters_it_is_the_same_model():
    mesh = jax.make_mesh((2,), ("device",), axis_types=(AxisType.Auto,))
    pinned = dataclasses.replace(CONFIG, scan=True, remat="layer", batch_axis="device")

    def placed(x):
        # The first axis that is not that of the layers.
        axis = next((i for i, n in enumerate(x.shape) if n >= 32 and n % 2 == 0), None)
        spec = P() if axis is None else P(*[None] * axis, "device")
        return jax.device_put(x, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        own = jax.tree.map(placed, stack_layers(plain()[0]))
        assert_is_plain(*loss_and_gradients(pinned, own))


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
    for remat in ("none", "attention", "dots", "layer"):
        config = dataclasses.replace(
            CONFIG, remat=remat, pre_norm=pre_norm, dropout=0.0, scan=True
        )
        graph, state = nnx.split(Encoder(config, rngs=nnx.Rngs(0)))

        def loss(state, graph=graph):
            encoder, lengths = nnx.merge(graph, state), jnp.array([8, 5])
            return jnp.sum(jnp.sin(encoder.encode(TOKENS, TOKENS % 2, lengths)))

        jaxpr = jax.make_jaxpr(jax.grad(loss))(nnx.to_pure_dict(state)).jaxpr
        names = [equation.primitive.name for equation in equations(jaxpr)]
        products.append(names.count("dot_general"))
    assert tuple(n - products[0] for n in products) == recomputed
    assert products[0] == 6 + 12
