"""Convolutional networks are those of the papers, and normalise as they say."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.convolutional import (
    EPSILON,
    ConvolutionalConfig,
    NormalisedConv,
    ResidualBlock,
    convolutional,
    pooled_statistics,
)

CONFIG = ConvolutionalConfig(width=8)


def sizes_of(**config):
    build = partial(convolutional, ConvolutionalConfig(**config))
    model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    return [x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


@pytest.mark.parametrize(
    ("architecture", "classes", "parameters"),
    [
        ("small", 10, 242_474),
        ("resnet18", 10, 11_173_962),
        ("resnet50", 1000, 25_557_032),
    ],
)
def test_the_number_of_parameters(architecture, classes, parameters):
    sizes = sizes_of(architecture=architecture, num_classes=classes)
    assert sum(sizes) == parameters


@pytest.mark.parametrize("architecture", ["small", "resnet50"])
def test_small_images_are_enough_and_logits_are_float32(architecture):
    config = ConvolutionalConfig(architecture, 7, 1, width=8, dtype="bfloat16")

    def forward(images):
        return convolutional(config, rngs=nnx.Rngs(0))(images)

    logits = jax.eval_shape(forward, jnp.zeros((2, 8, 8, 1)))
    assert (logits.shape, logits.dtype) == ((2, 7), jnp.float32)


def test_another_architecture_is_refused():
    with pytest.raises(ValueError, match="small, resnet18, resnet50, not 'vgg'"):
        ConvolutionalConfig("vgg")


def convolved(x, kernel, stride):
    """A convolution in NumPy, padded so that a stride of one keeps the size."""
    size = kernel.shape[0]
    edge = size // 2
    padded = np.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    patches = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (1, 2))
    patches = patches[:, ::stride, ::stride]
    return np.einsum("bhwcij,ijco->bhwo", patches, kernel)


def normalised(y, params, mean=None, variance=None):
    axes = (0, 1, 2)
    mean = y.mean(axes) if mean is None else mean
    variance = y.var(axes) if variance is None else variance
    return (y - mean) / np.sqrt(variance + EPSILON) * params["scale"] + params["bias"]


def test_a_residual_block_is_the_papers_in_numpy():
    rng = np.random.default_rng(0)
    block = ResidualBlock(CONFIG, (5, 4, 4, 6), (1, 3, 1), 2, rngs=nnx.Rngs(0))
    params = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32),
        nnx.to_pure_dict(nnx.state(block, nnx.Param)),
    )
    nnx.update(block, params)
    x = rng.normal(2.0, 3.0, size=(3, 6, 6, 5)).astype(np.float32)

    def expected(part, x, stride=1):
        return normalised(convolved(x, part["conv"]["kernel"], stride), part["norm"])

    first, second, third = (params["convs"][i] for i in range(3))
    y = np.maximum(expected(first, x), 0)
    y = np.maximum(expected(second, y, stride=2), 0)
    y = expected(third, y) + expected(params["shortcut"], x, stride=2)
    np.testing.assert_allclose(block(jnp.asarray(x)), np.maximum(y, 0), atol=2e-4)
    # In evaluation it normalises by what it last saw, each image by itself.
    block.eval()
    one = block(jnp.asarray(x[:1]))
    np.testing.assert_allclose(one, np.maximum(y, 0)[:1], atol=2e-4)


def test_a_block_begins_as_an_identity():
    block = ResidualBlock(CONFIG, (4, 4, 4), (3, 3), 1, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 4, 4, 4))
    np.testing.assert_array_equal(block(x), nnx.relu(x))


def test_weights_keep_the_power_of_what_relu_lets_through():
    kernel = NormalisedConv(CONFIG, 32, 64, 3, rngs=nnx.Rngs(0)).conv.kernel[...]
    assert float(jnp.std(kernel)) == pytest.approx(np.sqrt(2 / (9 * 32)), rel=0.02)


def test_pooled_statistics_are_those_of_all_batches_together():
    conv = NormalisedConv(CONFIG, 2, 3, 3, rngs=nnx.Rngs(0))
    shifts = jnp.arange(3.0)[:, None, None, None, None]
    batches = shifts + jax.random.normal(jax.random.key(0), (3, 4, 5, 5, 2))

    def statistics(x):
        conv(x)
        return jax.device_get(nnx.to_pure_dict(nnx.state(conv, nnx.BatchStat)))

    pooled = pooled_statistics([statistics(x) for x in batches])
    whole = statistics(jnp.concatenate(list(batches)))
    chex.assert_trees_all_close(pooled, whole, rtol=1e-5)
