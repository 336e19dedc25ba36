"""Parts of a chain in an order that cannot work are refused, and no others."""

import jax.numpy as jnp
import optax
import pytest
from virtual_workers import mesh_over

import onebit_jax
from onebit_jax import accumulate, exact_mean, freeze_at, sign_mean, skip_nonfinite

CLIP = onebit_jax.clip_by_worker_norm(1.0, "data")
EXACT = optax.chain(exact_mean("data"), optax.adam(0.1))


def adam():
    return onebit_jax.onebit_adam(0.1, sign_mean("data"), freeze_at(2))


def local_steps():
    every = onebit_jax.every(2)
    return onebit_jax.zero_one_adam(0.1, sign_mean("data"), freeze_at(2), sync=every)


HALF_WRAPPED = {
    "accumulate": lambda: optax.chain(accumulate(optax.identity(), 4, "data"), adam()),
    "skip_nonfinite": lambda: optax.chain(skip_nonfinite(CLIP, "data"), adam()),
    "skip_nonfinite around accumulate": lambda: optax.chain(
        skip_nonfinite(accumulate(CLIP, 4, "data"), "data"), optax.chain(CLIP, EXACT)
    ),
    "accumulate, named": lambda: optax.named_chain(
        ("wait", accumulate(optax.identity(), 4, "data")), ("adam", adam())
    ),
    "a chain inside": lambda: skip_nonfinite(
        optax.chain(accumulate(CLIP, 4, "data"), optax.masked(adam(), True)), "data"
    ),
}
FINE = {
    "around": lambda: optax.chain(CLIP, accumulate(adam(), 4, "data")),
    "around both": lambda: skip_nonfinite(accumulate(EXACT, 4, "data"), "data"),
    "nothing follows": lambda: optax.chain(
        accumulate(EXACT, 4, "data"), skip_nonfinite(optax.scale(1.0), "data")
    ),
    "one exchange inside, over another axis": lambda: optax.chain(
        skip_nonfinite(exact_mean("device"), ("data", "device")), adam()
    ),
    "names": lambda: optax.named_chain(("clip", CLIP), ("adam", local_steps())),
    "local steps last": lambda: optax.chain(CLIP, local_steps()),
    "local steps of some leaves": lambda: optax.chain(
        optax.masked(local_steps(), {"w": True, "b": False}),
        optax.masked(EXACT, {"w": False, "b": True}),
    ),
    "local steps in a wrapper": lambda: skip_nonfinite(
        optax.chain(CLIP, local_steps()), "data"
    ),
}


def init(tx):
    params = {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}
    return onebit_jax.init(tx, params, mesh_over({"data": 2, "device": 2}))


@pytest.mark.parametrize("name", HALF_WRAPPED)
def test_a_wrapper_beside_the_exchange(name):
    wrapper = "skip_nonfinite" if name.startswith("skip") else "accumulate"
    with pytest.raises(ValueError, match=rf"put the exchange inside {wrapper}\(.*\)"):
        init(HALF_WRAPPED[name]())


@pytest.mark.parametrize("after", [optax.scale(0.1), optax.chain(CLIP)])
def test_what_follows_local_steps(after):
    with pytest.raises(ValueError, match=r"steps of their own .* the last of a chain"):
        init(optax.chain(local_steps(), after))


def test_what_follows_local_steps_by_name():
    tx = optax.named_chain(("adam", local_steps()), ("half", optax.scale(0.5)))
    with pytest.raises(ValueError, match=r"steps of their own .* the last of a chain"):
        init(tx)


def test_a_rescaling_of_agreed_steps_around_local_ones():
    tx = optax.chain(CLIP, optax.contrib.schedule_free(local_steps(), 0.1))
    with pytest.raises(ValueError, match="schedule_free rescales steps of all"):
        init(tx)


@pytest.mark.parametrize("name", FINE)
def test_what_is_not_refused(name):
    init(FINE[name]())
