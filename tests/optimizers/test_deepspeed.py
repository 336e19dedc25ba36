"""DeepSpeed's optimizers and schedules, as docs/examples/from_deepspeed.py has them."""

import functools
import math

import from_deepspeed
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from deepspeed_exchange import DeepSpeedSignMean
from optimizers import deepspeed
from virtual_workers import Workers, mesh_of

import onebit_jax

OPTIMIZER = "*"
replay_of = functools.cache(deepspeed.replay_of)


@pytest.mark.parametrize("free", [False, True], ids=["call by call", "in one go"])
def test_every_trajectory_is_deepspeeds(deepspeed_file, free):
    run = replay_of(deepspeed_file)
    run.begin()
    roundings = [0] * len(run.groups)
    for t in range(1, run.config["steps"]):
        before = onebit_jax.steps_by_stage(run.state)
        run.step(t)
        taken = onebit_jax.steps_by_stage(run.state)
        assert run.static or taken[run.stage(t)] == before[run.stage(t)] + 1
        for place, group in enumerate(run.groups):
            roundings[place] += 1
            undecided = run.undecided(t, group, roundings[place])
            if undecided:
                print(f"call {t}, leaves {group}: {undecided} signs lie on zero")
            else:
                run.check(t, group, roundings[place])
            if undecided or not free:
                run.adopt(t, group)
                roundings[place] = 0


@pytest.mark.parametrize("fused", [False, True])
def test_one_worker_sends_nothing_and_compresses_nothing(fused):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)), jnp.float32)
    run = Workers(DeepSpeedSignMean(fused=fused), jnp.zeros(50), mesh_of(1))
    np.testing.assert_array_equal(run.update(x), x[0])
    tx = from_deepspeed.onebit_adam(1e-3, freeze_step=3)
    alone = Workers(tx, jnp.ones(50), mesh_of(1))
    for _ in range(3):
        alone.update(x, jnp.ones(50))
    assert onebit_jax.metrics(alone.state)["frozen_at"] == 2


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("sizes", [(1,), (7, 0), (64, 1000), (120, 120)])
def test_padding_is_deepspeeds(workers, sizes):
    quantum = workers * math.lcm(workers, 8)
    for fused in (False, True):
        state = onebit_jax.abstract_state(
            DeepSpeedSignMean(fused=fused),
            [np.zeros(size, np.float32) for size in sizes],
            mesh_of(workers),
        )
        rows = zip(*(node.value for node in state), strict=True)
        expected = [sum(sizes)] if fused else sizes
        for size, row in zip(expected, rows, strict=True):
            padded = math.ceil(size / quantum) * quantum
            lengths = [padded, padded // workers, padded - size]
            assert [x.shape for x in row] == [(workers, n) for n in lengths]


def settings_of(name, **settings):
    """A translated optimizer with a freeze step, by its own name for it."""
    step = settings.pop("freeze_step")
    renamed = "var_freeze_step" if name == "zero_one_adam" else "freeze_step"
    return getattr(from_deepspeed, name)(**settings, **{renamed: step})


each_optimizer = pytest.mark.parametrize("name", deepspeed.KINDS)


@pytest.mark.filterwarnings("ignore:The variance may be frozen")
@each_optimizer
def test_its_schedules_begin_after_the_call_that_is_dropped(name):
    gradients = jnp.tile(jnp.linspace(0.1, 1, 60), (2, 1))
    steps = []
    for rate in (1e-3, lambda count: 1e-3 * (1 + jnp.asarray(count, jnp.float32))):
        tx = optax.chain(settings_of(name, lr=rate, freeze_step=10))
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


@pytest.mark.filterwarnings("ignore:The variance may be frozen")
@each_optimizer
def test_its_mask_keeps_rows_without_gradients(name):
    params, moves = jnp.ones((8, 8)), []
    for mask in (None, lambda tree: tree.at[4:].set(0)):
        tx = settings_of(name, lr=1e-3, exp_avg_mask=mask, freeze_step=3)
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


@each_optimizer
def test_a_group_without_decay_is_masked(name):
    params, moves = {"bias": jnp.ones(8), "matrix": jnp.ones((8, 8))}, []
    for mask in (None, {"bias": False, "matrix": True}):
        tx = settings_of(name, lr=1e-3, weight_decay=0.5, mask=mask, freeze_step=9)
        run = Workers(tx, params, mesh_of(2))
        gradients = jax.tree.map(lambda p: jnp.stack([p, p]), params)
        moves.append(run.update(gradients, params))
    assert (moves[0]["bias"] != moves[1]["bias"]).all()
    np.testing.assert_array_equal(moves[0]["matrix"], moves[1]["matrix"])


def test_what_is_no_setting_is_refused():
    from_deepspeed.onebit_adam(1e-3, 10, cuda_aware=False, amsgrad=False)
    with pytest.raises(TypeError, match="'freeze_steps' is not a setting"):
        from_deepspeed.onebit_adam(1e-3, freeze_steps=10)
    with pytest.raises(TypeError, match="exp_avg_mask is a function here"):
        from_deepspeed.onebit_lamb(1e-3, exp_avg_mask=jnp.ones((8, 8)))
    with pytest.raises(TypeError, match="DeepSpeed refuses 'amsgrad' too"):
        from_deepspeed.zero_one_adam(1e-3, amsgrad=True)
    with pytest.raises(TypeError, match="'auto' stands for a number"):
        from_deepspeed.onebit_adam("auto")
