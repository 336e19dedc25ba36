"""The decoder is the published formulas, and no token knows of those after it."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import DECODER_SIZES, Decoder, DecoderConfig, decoder, next_token_loss
from models.decoder import RMSNorm
from models.dropout import sequence_keys
from train.core.objective import graph_of, init_params

CONFIG = DecoderConfig(
    vocab_size=11,
    hidden_size=12,
    num_layers=2,
    num_heads=2,
    intermediate_size=20,
    norm_epsilon=1e-2,
    rotary_base=50.0,
)
TOKENS = np.random.default_rng(0).integers(0, 11, (3, 8), dtype=np.int32)
DOCS = Path(__file__).parents[2] / "docs" / "train-flags.md"


def parameters(config):
    """Parameters none of which is zero or one."""
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: np.float32(x + random.normal(scale=0.3, size=x.shape)),
        init_params(partial(Decoder, config), 0),
    )


def compiled(config):
    graph = graph_of(partial(Decoder, config))
    return jax.jit(lambda params, *args: nnx.merge(graph, params)(*args))


def norm(params, x):
    mean_square = np.mean(x**2, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + CONFIG.norm_epsilon) * params["scale"]


def turn(x, position):
    """Positions as rotations of complex numbers."""
    half = x.shape[-1] // 2
    angles = position * CONFIG.rotary_base ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(params, x):
    """One sequence, one head and one token after the other."""
    mixed = np.zeros_like(x)
    q, k, v = np.split(x @ params["qkv"]["kernel"], 3, axis=-1)
    for head in np.split(np.arange(CONFIG.hidden_size), CONFIG.num_heads):
        for t in range(len(x)):
            keys = np.stack([turn(k[s, head], s) for s in range(t + 1)])
            scores = keys @ turn(q[t, head], t) / np.sqrt(len(head))
            weights = np.exp(scores) / np.sum(np.exp(scores))
            mixed[t, head] = weights @ v[: t + 1, head]
    return mixed @ params["out"]["kernel"]


def feed_forward(params, x):
    gate, up = (x @ params[name]["kernel"] for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ params["down"]["kernel"]


def logits_of(params, tokens):
    embedding = params["embedding"]["embedding"]
    x = embedding[tokens]
    for layer in params["layers"].values():
        x = x + attention(layer["attention"], norm(layer["attention_norm"], x))
        x = x + feed_forward(layer["feed_forward"], norm(layer["feed_forward_norm"], x))
    head = params["head"]["kernel"] if "head" in params else embedding.T
    return norm(params["norm"], x) @ head


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_published_formula(tied):
    config = replace(CONFIG, tied=tied)
    params = parameters(config)
    exact = jax.tree.map(np.float64, params)
    expected = np.stack([logits_of(exact, row) for row in TOKENS])
    np.testing.assert_allclose(
        compiled(config)(params, TOKENS), expected, rtol=1e-4, atol=1e-4
    )


def test_a_token_changes_nothing_before_it():
    forward, params = compiled(CONFIG), parameters(CONFIG)
    before = np.asarray(forward(params, TOKENS))
    for t in range(TOKENS.shape[1]):
        changed = TOKENS.copy()
        changed[:, t] = (changed[:, t] + 1) % CONFIG.vocab_size
        after = np.asarray(forward(params, changed))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.all(np.any(after[:, t:] != before[:, t:], axis=-1))


def test_the_norm_is_computed_in_float32():
    module = RMSNorm(replace(CONFIG, norm_epsilon=1e-6))
    # Squares and their sum would be infinite in float16.
    x = np.random.default_rng(2).normal(size=(4, CONFIG.hidden_size)) * 1e4
    x = x.astype(np.float16)
    exact = x.astype(np.float64)
    got = module(jnp.asarray(x))
    assert got.dtype == jnp.float16
    mean_square = np.mean(exact**2, axis=-1, keepdims=True)
    np.testing.assert_allclose(got, exact / np.sqrt(mean_square), rtol=2e-3)


def test_the_loss_is_of_the_next_tokens():
    logits = np.random.default_rng(3).normal(size=(3, 7, 11))
    read = []

    def fixed(token_ids, keys):
        read.append((token_ids, keys))
        return jnp.asarray(logits, jnp.float32)

    loss = next_token_loss(fixed, TOKENS)
    ((token_ids, keys),) = read
    np.testing.assert_array_equal(token_ids, TOKENS[:, :7])
    assert keys is None
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -np.mean(
        [
            np.log(probabilities[row, t, TOKENS[row, t + 1]])
            for row in range(3)
            for t in range(7)
        ]
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_what_is_recomputed_and_dropped_is_the_same():
    params = parameters(CONFIG)
    keys = sequence_keys(jax.random.key(4), jnp.arange(3))

    def gradient(remat):
        graph = graph_of(partial(Decoder, replace(CONFIG, dropout=0.25, remat=remat)))

        @jax.jit
        @jax.value_and_grad
        def of_loss(params):
            return next_token_loss(nnx.merge(graph, params), TOKENS, keys)

        return of_loss(params)

    kept = gradient("none")
    chex.assert_trees_all_close(gradient("layer"), kept, atol=1e-6)


def test_no_two_sublayers_drop_alike(monkeypatch):
    drawn = []

    def record(x, rate, keys):
        drawn.append(jax.random.key_data(keys))
        return x

    monkeypatch.setattr(decoder, "dropout", record)
    graph = graph_of(partial(Decoder, CONFIG))

    @jax.jit
    def keys_of(params):
        nnx.merge(graph, params)(
            TOKENS, sequence_keys(jax.random.key(4), jnp.arange(3))
        )
        return jnp.concatenate(drawn)

    keys = keys_of(parameters(CONFIG))
    assert len(np.unique(keys, axis=0)) == len(keys) == 3 * (1 + 2 * 2)


def test_half_precision_is_computed_in_and_logits_are_float32():
    config = replace(CONFIG, dtype="bfloat16")
    graph = graph_of(partial(Decoder, config))
    program = jax.make_jaxpr(lambda params: nnx.merge(graph, params)(TOKENS))
    traced = program(parameters(config))
    assert traced.out_avals[0].dtype == jnp.float32
    products = [e for e in traced.eqns if e.primitive.name == "dot_general"]
    assert {x.aval.dtype.name for e in products for x in e.invars} == {"bfloat16"}


def test_weights_that_join_the_residuals_begin_smaller():
    layer = init_params(partial(Decoder, DECODER_SIZES["nano"]), 0)["layers"][1]
    deviation = {
        name: float(np.std(layer[part][name]["kernel"]))
        for part in ("attention", "feed_forward")
        for name in layer[part]
    }
    plain = deviation["qkv"]
    assert plain == pytest.approx(0.0176, rel=0.05)  # 0.02, cut at two deviations
    for name in ("gate", "up"):
        assert deviation[name] == pytest.approx(plain, rel=0.05)
    for name in ("out", "down"):
        assert deviation[name] == pytest.approx(plain / np.sqrt(2 * 2), rel=0.05)


def test_heads_of_odd_size_are_refused():
    with pytest.raises(ValueError, match="heads of size 3 have one left"):
        replace(CONFIG, num_heads=4)


def test_the_page_tells_the_parameters_of_each_size():
    row = re.compile(r"^\| `(\w+)` \|.*\| ([\d,]+) \|$", re.MULTILINE)
    page = DOCS.read_text(encoding="utf-8")
    section = page.partition("## Decoders\n")[2].partition("\n## ")[0]
    told = {name: int(count.replace(",", "")) for name, count in row.findall(section)}
    counted = {}
    for name, sizes in DECODER_SIZES.items():
        size, width = sizes.hidden_size, sizes.intermediate_size
        layer = 4 * size**2 + 3 * size * width + 2 * size
        counted[name] = 256 * size + sizes.num_layers * layer + size
    assert told == counted
    shapes = jax.eval_shape(
        lambda: init_params(partial(Decoder, DECODER_SIZES["nano"]), 0)
    )
    assert sum(x.size for x in jax.tree.leaves(shapes)) == counted["nano"]
