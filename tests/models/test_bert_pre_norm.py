"""Pre-LayerNorm is the published formula, and no BERT of Hugging Face's."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import SIZES, Encoder, WeightsError, huggingface, stack_layers
from models.huggingface_names import tensors_of

CONFIG = dataclasses.replace(
    SIZES["tiny"],
    vocab_size=50,
    hidden_size=32,
    num_layers=3,
    intermediate_size=48,
    max_positions=16,
    pre_norm=True,
)
TOKENS = np.random.default_rng(1).integers(0, 50, (4, 12), dtype=np.int32)
TYPES = np.array(TOKENS % 2, np.int32)
LENGTHS = np.array([12, 5, 1, 9], np.int32)


def parameters(config):
    """Parameters none of which is zero or one, a layer each."""
    one_each = dataclasses.replace(config, scan=False)
    state = nnx.state(Encoder(one_each, rngs=nnx.Rngs(0)), nnx.Param)
    random = np.random.default_rng(2)
    return jax.tree.map(
        lambda x: np.float32(x + random.normal(scale=0.3, size=x.shape)),
        nnx.to_pure_dict(state),
    )


def compiled(config):
    graph = nnx.graphdef(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))

    @jax.jit
    def encode(params, batch, keys=None):
        return nnx.merge(graph, params).encode(*batch, keys)

    return encode


def batch(rows=slice(None)):
    return [jnp.asarray(x[rows]) for x in (TOKENS, TYPES, LENGTHS)]


def norm(params, x, epsilon=CONFIG.layer_norm_epsilon):
    deviation = np.sqrt(x.var(axis=-1, keepdims=True) + epsilon)
    normal = (x - x.mean(axis=-1, keepdims=True)) / deviation
    return normal * params["scale"] + params["bias"]


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


def attention(params, x, heads):
    batch, length, hidden = x.shape
    q, k, v = (
        part.reshape(batch, length, heads, hidden // heads)
        for part in np.split(dense(params["qkv"], x), 3, axis=-1)
    )
    scores = np.einsum("btnd,bsnd->bnts", q, k) / math.sqrt(hidden // heads)
    is_padding = np.arange(length) >= LENGTHS[:, None]
    scores[np.broadcast_to(is_padding[:, None, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("bnts,bsnd->btnd", weights, v)
    return dense(params["out"], mixed.reshape(batch, length, hidden))


def feed_forward(params, x):
    x = dense(params["up"], x)
    cdf = 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return dense(params["down"], x * cdf)


def embedded(params):
    word, position, token_type = (
        params[name]["embedding"] for name in ("word", "position", "token_type")
    )
    x = word[TOKENS] + position[: TOKENS.shape[1]] + token_type[TYPES]
    return norm(params["norm"], x)


def reference(params):
    """The encoder in NumPy, in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = embedded(params["embeddings"])
    for layer in params["layers"].values():
        y = norm(layer["attention_norm"], x)
        x = x + attention(layer["attention"], y, CONFIG.num_heads)
        y = norm(layer["feed_forward_norm"], x)
        x = x + feed_forward(layer["feed_forward"], y)
    return norm(params["final_norm"], x)


def stacked(config, params):
    return stack_layers(params) if config.scan else params


@pytest.mark.parametrize(("scan", "remat"), [(False, "none"), (True, "layer")])
def test_is_the_formula(scan, remat):
    config = dataclasses.replace(CONFIG, scan=scan, remat=remat)
    params = parameters(config)
    with jax.default_matmul_precision("highest"):
        hidden = compiled(config)(stacked(config, params), batch())
    np.testing.assert_allclose(hidden, reference(params), rtol=2e-5, atol=2e-5)


def test_what_is_added_to_the_residual_stream_starts_small():
    model = nnx.to_pure_dict(nnx.state(Encoder(CONFIG, rngs=nnx.Rngs(0)), nnx.Param))
    layer = model["layers"][1]
    for part, name, layers in (
        ("attention", "qkv", 0.5),
        ("attention", "out", CONFIG.num_layers),
        ("feed_forward", "up", 0.5),
        ("feed_forward", "down", CONFIG.num_layers),
    ):
        deviation = 0.88 * CONFIG.initializer_range / math.sqrt(2 * layers)
        kernel = np.asarray(layer[part][name]["kernel"])
        assert kernel.std() == pytest.approx(deviation, rel=0.05), name


def test_hugging_face_has_no_such_bert(tmp_path):
    config = dataclasses.replace(CONFIG, pre_norm=False)
    params = parameters(config)
    tensors = tensors_of(params, config, "Encoder")
    with pytest.raises(WeightsError, match="LayerNorms after the sublayers"):
        huggingface.to_params(tensors, CONFIG, "Encoder")
    with pytest.raises(WeightsError, match=r"its weights are for pre_norm=False\.$"):
        huggingface.write(tmp_path / "new", CONFIG, parameters(CONFIG), "BertModel")
    assert not (tmp_path / "new").exists()
