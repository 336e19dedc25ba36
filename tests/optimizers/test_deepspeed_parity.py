"""1-bit Adam in DeepSpeed's layout, against trajectories of DeepSpeed's own."""

import dataclasses
import functools
import math

import from_deepspeed
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from optimizers import deepspeed
from optimizers.deepspeed import ERRORS, replaced
from virtual_workers import Workers, mesh_of

import onebit_jax

OPTIMIZER = "onebit_adam"


def signed_values(golden, config, t, i):
    """Values that workers and servers took signs of at call t."""
    n, (b1, _) = config["workers"], config["betas"]
    gradient = golden[f"grad_{t}_{i}"].reshape(n, -1).astype(float)
    mu = golden[f"mu_{t - 1}_{i}"].reshape(1, -1).astype(float)
    before = deepspeed.errors_before(golden, t, f"_{i}")
    return deepspeed.signed_values(b1 * mu + (1 - b1) * gradient, *before)


@functools.cache
def trajectory(file):
    golden, config = deepspeed.read(file)
    names = "lr", "freeze_step", "betas", "eps", "weight_decay"
    tx = from_deepspeed.onebit_adam(**{name: config[name] for name in names})
    # With a freeze step of 1 it compresses from its first update on.
    stage = "compressed" if config["freeze_step"] < 2 else None
    return deepspeed.Trajectory(tx, golden, config, stage)


def numbers(run, i, compressed):
    adam = run.state[0]
    found = {"param": run.params, "mu": adam.mu, "nu": adam.nu}
    if compressed:
        found |= {name: getattr(adam.exchange, name).value for name in ERRORS}
    return {name: np.asarray(leaves[i]) for name, leaves in found.items()}


def go_on_from_deepspeed(run, t, i):
    def its(leaves, name):
        return replaced(leaves, i, run.golden[f"{name}_{t}_{i}"])

    adam, *rest = run.state
    errors = {
        name: dataclasses.replace(node, value=its(node.value, name))
        for name, node in adam.exchange._asdict().items()
        if f"{name}_{t}_{i}" in run.golden
    }
    run.params = its(run.params, "param")
    moments = {"mu": its(adam.mu, "mu"), "nu": its(adam.nu, "nu")}
    exchange = adam.exchange._replace(**errors)
    run.state = (adam._replace(exchange=exchange, **moments), *rest)


@pytest.mark.parametrize("free", [False, True], ids=["call by call", "in one go"])
def test_every_trajectory_is_deepspeeds(deepspeed_file, free):
    golden, config = deepspeed.read(deepspeed_file)
    run = trajectory(deepspeed_file)
    run.begin()
    roundings = dict.fromkeys(run.leaves, 0)
    for t in range(1, config["steps"]):
        run.step(t)
        compressed = bool(golden[f"compressed_{t}"])
        if t + 1 < config["steps"]:
            frozen = int(run.state[0].frozen_at) > 0
            assert frozen == bool(golden[f"compressed_{t + 1}"])
        for i in run.leaves:
            roundings[i] += 1
            signed = signed_values(golden, config, t, i) if compressed else ()
            undecided = sum(deepspeed.undecided_signs(x, roundings[i]) for x in signed)
            if undecided:
                print(f"call {t}, leaf {i}: {undecided} signs lie on zero")
            else:
                gradient = (1 - config["betas"][0]) * golden[f"grad_{t}_{i}"]
                terms = {"param": golden[f"param_{t}_{i}"], "mu": gradient}
                terms |= dict(zip(ERRORS, signed, strict=False))
                for name, value in numbers(run, i, compressed).items():
                    deepspeed.assert_near(
                        value,
                        golden[f"{name}_{t}_{i}"],
                        f"{name} of leaf {i} after call {t}",
                        terms.get(name, 0.0),
                        roundings[i],
                    )
            if undecided or not free:
                go_on_from_deepspeed(run, t, i)
                roundings[i] = 0


def test_one_worker_sends_nothing_and_compresses_nothing():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)), jnp.float32)
    run = Workers(onebit_jax.deepspeed_sign_mean("data"), jnp.zeros(50), mesh_of(1))
    np.testing.assert_array_equal(run.update(x), x[0])


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_padding_is_deepspeeds(workers, size):
    quantum = workers * math.lcm(workers, 8)
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(AxisType.Auto,))
    state = onebit_jax.abstract_state(
        onebit_jax.deepspeed_sign_mean("data"), np.zeros(size, np.float32), mesh
    )
    padded = math.ceil(size / quantum) * quantum
    assert state.worker_error.value.shape == (workers, padded)
    assert state.server_error.value.shape == (workers, padded // workers)


@pytest.mark.filterwarnings("ignore:The variance may be frozen")
@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_its_schedules_begin_after_the_call_that_is_dropped(name):
    step = "var_freeze_step" if name == "zero_one_adam" else "freeze_step"
    gradients = jnp.tile(jnp.linspace(0.1, 1, 60), (2, 1))
    steps = []
    for rate in (1e-3, lambda count: 1e-3 * (1 + jnp.asarray(count, jnp.float32))):
        tx = optax.chain(getattr(from_deepspeed, name)(rate, **{step: 10}))
        run = Workers(tx, jnp.ones(60), mesh_of(2))
        steps.append(run.update(gradients, jnp.ones(60)))
    np.testing.assert_array_equal(*steps)
    assert np.abs(steps[0]).min() > 0


@pytest.mark.parametrize("warmup_type", ["log", "linear", "Linear"])
def test_its_schedule_is_deepspeeds(warmup_type):
    """By logarithms where it does not know the word; level before its first step."""
    rise = {"warmup_max_lr": 4e-4, "warmup_num_steps": 10}
    rise |= {"warmup_min_lr": 1e-4, "warmup_type": warmup_type}
    schedule = from_deepspeed.warmup_decay(50, **rise)
    risen = 7 / 10 if warmup_type == "linear" else np.log(8) / np.log(10)
    for step, share in {-1: 0, 0: 0, 7: risen, 10: 1, 20: 0.75, 50: 0, 60: 0}.items():
        expected = 1e-4 + 3e-4 * share
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-5)
        level = 1e-4 + 3e-4 * (share if step < 10 else 1)
        warmup = from_deepspeed.warmup(1.0, **rise)(step)
        np.testing.assert_allclose(warmup, level, rtol=1e-5)


def test_a_warm_up_without_a_rate_rises_to_the_optimizers():
    rise = {"warmup_num_steps": 10}
    np.testing.assert_allclose(from_deepspeed.warmup(3e-4, **rise)(20), 3e-4)
    decay = from_deepspeed.warmup_decay(20, **rise)
    np.testing.assert_allclose(decay(10), 1e-3)


def without_last_rows(tree):
    return tree.at[4:].set(0)


@pytest.mark.filterwarnings("ignore:The variance may be frozen")
@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_its_mask_keeps_rows_without_gradients(name):
    step = "var_freeze_step" if name == "zero_one_adam" else "freeze_step"
    params = jnp.ones((8, 8))
    moves = []
    for mask in (None, without_last_rows):
        tx = getattr(from_deepspeed, name)(1e-3, mask=mask, **{step: 3})
        run = Workers(tx, params, mesh_of(2))
        moves.append([])
        for t in range(8):
            gradients = jax.random.normal(jax.random.key(t), (2, 8, 8))
            gradients = gradients.at[:, 4:].set(0)
            moves[-1].append(run.update(gradients, params))
    without, with_mask = np.abs(np.array(moves)).max((1, 3))
    assert without[4:].min() > 1, "signs over a variance of zero"
    assert with_mask[4:].max() == 0
    assert 0 < with_mask[:4].min() < with_mask[:4].max() < 1


def test_what_is_no_setting_is_refused():
    from_deepspeed.onebit_adam(1e-3, 10, cuda_aware=False, amsgrad=False)
    with pytest.raises(TypeError, match="'freeze_steps' is not a setting"):
        from_deepspeed.onebit_adam(1e-3, freeze_steps=10)
    with pytest.raises(TypeError, match="mask is a function that returns a tree"):
        from_deepspeed.onebit_lamb(1e-3, mask=jnp.ones((8, 8)))
    with pytest.raises(TypeError, match="'amsgrad' is not a setting"):
        from_deepspeed.zero_one_adam(1e-3, amsgrad=True)
