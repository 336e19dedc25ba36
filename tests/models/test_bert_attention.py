"""cuDNN's attention is what the program asks for, or it is refused; XLA's elsewhere."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models import SIZES, Encoder

TINY = dataclasses.replace(
    SIZES["tiny"], vocab_size=50, hidden_size=32, intermediate_size=64, max_positions=16
)
CUDNN = dataclasses.replace(TINY, dtype="bfloat16", attention="cudnn")
SCORES = "tensor<2x2x12x12x"
"""Sequences, heads, tokens, tokens."""


def lowered(config, platform="cuda", place=lambda gradient: gradient):
    """The program of an encoder's gradient, for a GPU that need not be there."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))

    @place
    @jax.grad
    def gradient(state, tokens, lengths):
        hidden = nnx.merge(graph, state).encode(tokens, tokens, lengths)
        return jnp.sum(hidden.astype(jnp.float32))

    tokens = jax.ShapeDtypeStruct((2, 12), jnp.int32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    traced = jax.jit(gradient).trace(state, tokens, lengths)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def cudnn(monkeypatch):
    """Lets jax lower for cuDNN where there is none: it asks for its version alone."""
    module = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{module}.check_cudnn_version", lambda: 91_000)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("given", "forward", "backward"),
    # A loop's body is in the program once.
    [({}, 2, 2), ({"scan": True}, 1, 1), ({"scan": True, "remat": "layer"}, 2, 1)],
)
def test_cudnn_computes_forward_and_backward(given, forward, backward):
    program = lowered(dataclasses.replace(CUDNN, **given))
    assert program.count("@__cudnn$fmhaSoftmax(") == forward
    assert program.count("@__cudnn$fmhaSoftmaxBackward(") == backward
    # By lengths: a mask would be a bias.
    assert program.count("PADDING") == forward + backward
    assert SCORES not in program


def test_xla_computes_without_cudnn():
    # jax's own lowering mixes bfloat16 and float32.
    with jax.numpy_dtype_promotion("standard"):
        program = lowered(dataclasses.replace(CUDNN, attention="xla"))
    assert "cudnn" not in program
    assert SCORES in program


def test_cudnn_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU and cuDNN .* choose"):
        lowered(CUDNN, "cpu")


@pytest.mark.usefixtures("cudnn")
def test_cudnn_is_not_replaced_on_another_platform():
    with pytest.raises(NotImplementedError, match="not found for platform cpu"):
        lowered(CUDNN, "cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "float32"}, "bfloat16 or float16, not float32; choose dtype="),
        ({"num_heads": 8}, "multiple of 8 up to 256, not 4; choose another"),
        ({"hidden_size": 528}, "multiple of 8 up to 256, not 264"),
        ({"remat": "attention"}, 'no scores .*; choose remat="none" or attention="xla'),
        ({"attention": "flash"}, "attention is one of xla, cudnn, not 'flash'"),
    ],
)
def test_what_cudnn_cannot_compute_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CUDNN, **given)
