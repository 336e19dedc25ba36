"""An adaptive optimizer behind an exchange of signs is warned of, and nothing else."""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib
from virtual_workers import mesh_over

import onebit_jax
from onebit_jax import freeze_at, quantized_mean, sign_mean

OF_HOSTS = onebit_jax.hierarchical(sign_mean("host"), within="device")
RANDOM_VOTES = onebit_jax.random_vote_mean("host", back="vote")
CLIP = onebit_jax.clip_by_worker_norm(1.0, "host")
ADAM = optax.adam(0.1)
OURS = {
    "onebit_adam": onebit_jax.onebit_adam,
    "onebit_lamb": onebit_jax.onebit_lamb,
    "zero_one_adam": onebit_jax.zero_one_adam,
}
BEHIND_SIGNS = {
    "sign_mean": lambda: optax.chain(sign_mean("host"), ADAM),
    "count_mean": lambda: optax.chain(onebit_jax.count_mean("host"), optax.yogi(0.1)),
    "deepspeed": lambda: optax.chain(
        onebit_jax.deepspeed_sign_mean("host"), optax.rmsprop(0.1)
    ),
    "hierarchical": lambda: optax.chain(OF_HOSTS, optax.lamb(0.1)),
    "vote_mean": lambda: optax.chain(onebit_jax.vote_mean("host"), ADAM),
    "random votes": lambda: optax.chain(RANDOM_VOTES, ADAM),
    "hierarchical votes": lambda: optax.chain(
        onebit_jax.hierarchical(onebit_jax.vote_mean("host"), "device"), ADAM
    ),
    "votes by shard": lambda: optax.chain(
        onebit_jax.per_shard(RANDOM_VOTES, {"w": jax.P("device"), "b": jax.P()}), ADAM
    ),
    **{
        make.__name__: lambda make=make: optax.chain(sign_mean("host"), make(0.1))
        for make in (
            optax.adadelta,
            optax.adafactor,
            optax.adagrad,
            optax.adan,
            optax.amsgrad,
            optax.novograd,
            contrib.ademamix,
            contrib.dadapt_adamw,
            contrib.madgrad,
            contrib.momo_adam,
            contrib.prodigy,
            contrib.schedule_free_adamw,
            contrib.simplified_ademamix,
        )
    },
    "sm3": lambda: optax.chain(sign_mean("host"), optax.scale_by_sm3()),
    "a chain of names": lambda: optax.named_chain(
        ("signs", sign_mean("host")), ("adam", ADAM)
    ),
    "a chain in a chain": lambda: optax.chain(
        optax.chain(CLIP, sign_mean("host")), optax.masked(ADAM, True)
    ),
    "skipping": lambda: onebit_jax.skip_nonfinite(
        optax.chain(CLIP, sign_mean("host"), ADAM), "host"
    ),
}
FINE = {
    "four bits": lambda: optax.chain(quantized_mean("host", 4), ADAM),
    "exact": lambda: optax.chain(onebit_jax.exact_mean("host"), ADAM),
    "means of votes": lambda: optax.chain(
        onebit_jax.vote_mean("host", back="mean"), ADAM
    ),
    "means of random votes": lambda: optax.chain(
        onebit_jax.random_vote_mean("host"), ADAM
    ),
    "votes in an optimizer": lambda: optax.chain(
        onebit_jax.scale_by_distributed_lion(onebit_jax.vote_mean("host")), ADAM
    ),
    "lion": lambda: optax.chain(sign_mean("host"), optax.lion(0.1)),
    "sgd": lambda: optax.chain(sign_mean("host"), optax.sgd(0.1, momentum=0.9)),
    "momo": lambda: optax.chain(sign_mean("host"), contrib.momo(0.1)),
    "a second exchange": lambda: optax.chain(
        sign_mean("host"),
        onebit_jax.onebit_adam(0.1, sign_mean("host"), freeze_at(1)),
    ),
    "beside": lambda: optax.partition(
        {
            "signs": onebit_jax.onebit_adam(0.1, sign_mean("host"), freeze_at(1)),
            "exact": optax.chain(onebit_jax.exact_mean("host"), ADAM),
        },
        {"w": "signs", "b": "exact"},
    ),
    **{
        name: lambda make=make: make(0.1, sign_mean("host"), freeze_at(1))
        for name, make in OURS.items()
    },
}


def warnings_of(tx, params=None):
    params = params or {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        onebit_jax.init(tx, params, mesh_over({"host": 2, "device": 2}))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", BEHIND_SIGNS)
def test_second_moments_of_signs(name):
    (said,) = warnings_of(BEHIND_SIGNS[name]())
    assert "one magnitude a block" in said
    assert "use onebit_jax.onebit_adam" in said


@pytest.mark.parametrize("name", FINE)
def test_what_is_not_warned_of(name):
    assert not warnings_of(FINE[name]())


def test_parameters_whose_names_are_those_of_second_moments():
    class Attention(NamedTuple):
        q: jax.Array
        v: jax.Array

    params = Attention(jnp.zeros((8, 8)), jnp.zeros((8, 8)))
    assert not warnings_of(FINE["sgd"](), params)
    assert warnings_of(BEHIND_SIGNS["sign_mean"](), params)
