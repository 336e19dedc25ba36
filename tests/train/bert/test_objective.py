"""The training loss: dropout by seed and step, whatever the number of workers."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import SIZES, PreTrainingBatch
from train.bert.objective import evaluation_loss, init_params, training_loss

CONFIG = replace(
    SIZES["tiny"], vocab_size=40, hidden_size=16, intermediate_size=32, num_layers=1
)


@pytest.fixture(scope="module")
def batch():
    tokens = jax.random.randint(jax.random.key(0), (8, 12), 5, 40)
    return PreTrainingBatch(
        token_ids=tokens,
        token_types=jnp.zeros_like(tokens),
        lengths=jnp.full(8, 12),
        masked_positions=jnp.tile(jnp.array([[2, 7]]), (8, 1)),
        masked_labels=tokens[:, 3:5],
        masked_weights=jnp.ones((8, 2)),
        next_sentence_labels=jnp.arange(8) % 2,
    )


first_params = functools.cache(init_params)


def mean_loss(config, batch, *, workers, seed, step):
    """The mean of the workers' losses, as one program."""
    loss_fn, params = training_loss(config, seed), first_params(config, 0)
    shares = jax.tree.map(lambda x: x.reshape(workers, -1, *x.shape[1:]), batch)
    one = jax.vmap(lambda share: loss_fn(params, share, step), axis_name="data")
    return float(jnp.mean(jax.jit(one)(shares)))


def test_dropout_depends_on_seed_and_step_and_not_on_the_number_of_workers(batch):
    loss = functools.partial(mean_loss, CONFIG, batch)
    losses = [
        loss(workers=2, seed=seed, step=step) for seed, step in ((0, 5), (0, 1), (1, 5))
    ]
    assert len(set(losses)) == 3
    assert loss(workers=1, seed=0, step=5) == pytest.approx(losses[0], rel=1e-6)


def test_without_dropout_it_is_the_evaluation_loss(batch):
    config = replace(CONFIG, dropout=0.0)
    training = mean_loss(config, batch, workers=4, seed=0, step=0)
    params = first_params(config, 0)
    assert training == pytest.approx(
        float(jax.jit(evaluation_loss(config))(params, batch))
    )
    assert training == pytest.approx(np.log(40) + np.log(2), rel=0.05)
    # Evaluation drops nothing, whatever the model was trained with.
    evaluated = jax.jit(evaluation_loss(CONFIG))(first_params(CONFIG, 0), batch)
    assert training == pytest.approx(float(evaluated))
