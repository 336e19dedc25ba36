"""A frozen variance follows the power of its gradients' rows and columns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from workers import Workers, mesh_of

import onebit_jax
from onebit_jax import exact_mean, freeze_at, onebit_adam, sign_mean

SHAPES = {"stack": (2, 18, 16), "matrix": (20, 33), "narrow": (40, 15), "vector": (40,)}
LINES = 2 * (18 + 16) + 20 + 33
PERIOD = 32


def factors(seed):
    """For each leaf, factors that are a product of a row's and a column's."""
    rng = np.random.default_rng(seed)

    def of(shape):
        if len(shape) < 2:
            return np.full(shape, rng.uniform(0.5, 2))
        rows = rng.uniform(0.8, 1.2, size=(*shape[:-1], 1))
        return rows * rng.uniform(0.8, 1.2, size=(*shape[:-2], 1, shape[-1]))

    return {name: of(shape).astype(np.float32) for name, shape in SHAPES.items()}


def signs(workers=4):
    rng = np.random.default_rng(5)
    return {k: rng.choice([-1.0, 1.0], size=s) for k, s in SHAPES.items()}


def test_magnitudes_of_rows_and_columns_are_followed():
    """The paper's update is as many times too large as the gradients have grown."""
    tx = onebit_adam(1.0, exact_mean("data"), freeze_at(5), b1=0.5, b2=0.8)
    run = Workers(tx, {k: jnp.zeros(s) for k, s in SHAPES.items()}, mesh_of(4))
    before, after = factors(0), factors(1)
    after["stack"][1] *= 7  # a matrix of a stack alone
    for step in range(150):
        magnitudes = before if step < 5 else after
        own = {
            k: jnp.asarray(np.stack([s * magnitudes[k]] * 4), jnp.float32)
            for k, s in signs().items()
        }
        updates = run.update(own)
    for name in ("stack", "matrix", "vector"):
        np.testing.assert_allclose(-updates[name], signs()[name], rtol=1e-3)
    # Too few columns for lines of their own: a leaf's power alone is followed.
    assert np.abs(np.abs(updates["narrow"]) - 1).max() > 0.1


def test_a_line_that_falls_silent_keeps_a_quarter_of_its_variance():
    """The signs of others in its block go on, and would be divided by nothing."""
    tx = onebit_adam(1.0, exact_mean("data"), freeze_at(5), b1=0.5, b2=0.8)
    run = Workers(tx, {"matrix": jnp.zeros(SHAPES["matrix"])}, mesh_of(2))
    sign = signs()["matrix"]
    for step in range(150):
        own = sign.copy()
        own[3] *= 1e-3 if step >= 5 else 1
        updates = run.update({"matrix": jnp.asarray(np.stack([own] * 2), jnp.float32)})
    leaf = (19 + 1e-6) / 20
    np.testing.assert_allclose(
        -updates["matrix"][3], 1e-3 * sign[3] / np.sqrt(leaf / 4), rtol=1e-3
    )


def test_every_line_is_exchanged_once_a_period():
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(3))
    run = Workers(tx, {k: jnp.zeros(s) for k, s in SHAPES.items()}, mesh_of(4))
    rng = np.random.default_rng(0)

    def step():
        run.update(
            {
                k: jnp.asarray(rng.normal(size=(4, *s)), jnp.float32)
                for k, s in SHAPES.items()
            }
        )
        return np.asarray(run.state[0].power.lines)

    for _ in range(3):
        lines = step()
    assert lines.shape == (LINES,)
    np.testing.assert_array_equal(lines, run.state[0].frozen_power.lines)
    exchanged = np.zeros(LINES, int)
    for _ in range(PERIOD):
        before, lines = lines, step()
        exchanged += lines != before
        own = np.asarray(run.state[0].own_lines.value)
        mean = np.mean(own, axis=0) / (1 - 0.999 ** int(run.state[0].count))
        now = lines != before
        np.testing.assert_allclose(lines[now], mean[now], rtol=1e-4)
    # The last of them again and again, where a period is longer than they are.
    assert exchanged.min() == 1
    assert exchanged.sum() <= LINES + PERIOD


def test_lines_add_little_to_what_is_sent():
    """Once a period: of a square matrix of 512, 2 / 16 of a bit a row and column."""
    params, mesh = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}, mesh_of(4)

    def sent(**options):
        tx = onebit_adam(0.1, sign_mean("data"), freeze_at(3), **options)
        loss = lambda p, x: jnp.sum(jnp.square(p["w"])) * jnp.mean(x)  # noqa: E731
        state = onebit_jax.abstract_state(tx, params, mesh)
        batch = jax.ShapeDtypeStruct((4, 1), jnp.float32)
        step = onebit_jax.data_parallel(loss, tx, mesh).step
        traffic = onebit_jax.traffic(step.lower(params, state, batch).compile(), mesh)
        return [c for c in traffic.collectives if c.dtype == "f32"]

    ours, published = sent(), sent(as_published=True)
    in_stage = lambda cs, s: sum(c.bytes for c in cs if c.stage == s)  # noqa: E731
    for stage, lines in (("warmup", 1024), ("compressed", 1024 // PERIOD)):
        more = in_stage(ours, stage) - in_stage(published, stage)
        assert more == 4 * (1 + lines), stage


def test_more_workers_keep_the_mean_of_their_lines():
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(3))
    params = {k: jnp.zeros(s) for k, s in SHAPES.items()}
    run = Workers(tx, params, mesh_of(2))
    rng = np.random.default_rng(0)
    for _ in range(5):
        own = {k: rng.normal(size=(2, *s)) for k, s in SHAPES.items()}
        run.update({k: jnp.asarray(g, jnp.float32) for k, g in own.items()})
    old = run.state[0].own_lines.value
    new = onebit_jax.resize(run.state, tx, params, mesh_of(4))[0].own_lines.value
    assert new.shape == (4, LINES)
    for worker in np.asarray(new):
        np.testing.assert_allclose(worker, np.mean(old, axis=0), rtol=1e-6)


def test_a_state_of_other_workers_is_refused_without_an_exchange_that_looks():
    tx = onebit_adam(0.1, exact_mean("data"), freeze_at(3))
    params = {"matrix": jnp.zeros(SHAPES["matrix"])}
    state = onebit_jax.init(tx, params, mesh_of(4))
    state = jax.device_put(state, jax.NamedSharding(mesh_of(2), P()))

    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(2),
        in_specs=(P("data"), onebit_jax.state_specs(state)),
        out_specs=P(),
    )
    def update(own, state):
        return tx.update({"matrix": own[0]}, state)[0]

    with pytest.raises(ValueError, match="state was not made for these leaves"):
        jax.jit(update)(jnp.zeros((2, *SHAPES["matrix"])), state)
