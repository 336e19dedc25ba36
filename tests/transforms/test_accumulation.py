"""A step in micro-batches is the step of the whole batch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import onebit_jax
from models import SIZES, PreTrainingBatch
from train.bert.objective import init_params, training_loss
from train.core.objective import accumulated

CONFIG = replace(
    SIZES["tiny"], vocab_size=40, hidden_size=16, intermediate_size=32, num_layers=1
)
WORKERS, SHARE = 2, 8


@pytest.fixture(scope="module")
def batch():
    """Sequences with one to three predictions each; in a micro-batch, with none."""
    n = WORKERS * SHARE
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 40, (n, 12))
    counts = rng.integers(1, 4, n)
    counts[:2] = 0
    return PreTrainingBatch(
        token_ids=tokens,
        token_types=np.zeros_like(tokens),
        lengths=rng.integers(9, 13, n),
        masked_positions=np.tile([2, 5, 7], (n, 1)),
        masked_labels=tokens[:, 3:6],
        masked_weights=(np.arange(3) < counts[:, None]).astype(np.float32),
        next_sentence_labels=np.arange(n) % 2,
    )


def step(batch, accumulate):
    """Loss, and the mean of the workers' gradients; with dropout."""
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))
    tx = optax.chain(onebit_jax.exact_mean("data"), optax.sgd(1.0))
    loss_fn = training_loss(CONFIG, 0, "data", accumulate)
    run = onebit_jax.data_parallel(loss_fn, tx, mesh)
    before = init_params(CONFIG, 0)
    params, state = run.init(before)
    compiled = run.step.lower(params, state, batch, np.uint32(5)).compile()
    traffic = onebit_jax.traffic(compiled, mesh)
    params, _, loss = compiled(params, state, jax.device_put(batch), np.uint32(5))
    gradient = jax.tree.map(lambda x, y: np.subtract(x, y), before, params)
    return float(loss), gradient, traffic.sent_bytes("warmup")


@pytest.fixture(scope="module")
def whole(batch):
    return step(batch, 1)


def test_a_step_in_micro_batches_is_the_step_of_the_whole_batch(batch, whole):
    loss, gradient, sent = step(batch, 4)
    assert loss == pytest.approx(whole[0], rel=1e-6)
    for one, other in zip(*map(jax.tree.leaves, (gradient, whole[1])), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    # Workers exchange once, whatever their micro-batches.
    assert sent == whole[2]


def test_only_one_micro_batch_is_held_at_a_time():
    def loss_fn(p, x, _):
        for _ in range(8):
            x = jnp.tanh(x @ p)
        return jnp.sum(x)

    def temporary(fun):
        arguments = jnp.ones((64, 64)), jnp.ones((4096, 64)), ()
        compiled = jax.jit(jax.grad(fun)).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(accumulated(loss_fn, 16)) < temporary(loss_fn) / 4


def test_gradients_are_summed_in_float32():
    def gradient(x):
        loss_fn = accumulated(lambda p, x, _: jnp.sum(p * x), 512)
        return jax.grad(loss_fn)(jnp.bfloat16(1), x, ())

    # In bfloat16 256 + 1 is 256.
    assert gradient(jnp.ones(512, jnp.bfloat16)) == 512
