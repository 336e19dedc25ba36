"""1-bit LAMB: its formula, its ratios and factors, its stages, its wrappers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import formula_lamb
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import exact_mean, freeze_at, onebit_lamb, sign_mean

WORKERS = 4
SHAPES = {"bias": (17,), "kernel": (30, 17), "matrix": (16, 20), "scale": ()}
DECAYED = {"bias": False, "kernel": True, "matrix": True, "scale": False}


def tree_of(seed, workers=None, dtype=jnp.float32):
    rng, leading = np.random.default_rng(seed), () if workers is None else (workers,)
    return {
        k: jnp.asarray(rng.normal(0.1, 1, size=(*leading, *s)), dtype)
        for k, s in SHAPES.items()
    }


def uneven_gradients(step, freeze):
    """Of two biases one wakes late; a row is silent before the freeze, one after."""
    gradients = jax.tree.map(np.array, tree_of(1000 + step, WORKERS))
    kernel, late = gradients["kernel"], step >= freeze
    kernel[:, 8 if late else 2] = 0
    if step == freeze + 9:
        kernel[:, 5, 0] = 1e4
    gradients["bias"] *= 5 if late else 1
    gradients["matrix"] *= 0.01
    return gradients


PUBLISHED = {"bias_correction": False, **onebit_jax.LAMB_AS_PUBLISHED}
PARTS = {
    "default": ({}, {}),
    "as published": (PUBLISHED, {"parts": frozenset(), "bias_correction": False}),
    "bounded alone": (
        PUBLISHED | {"bound": 3.0},
        {"parts": {"bound"}, "bias_correction": False},
    ),
}
NARROW = {"ratio_limits": (0.2, 0.3), "ratio_decay": 0.5, "factor_change": 0.02}
# Each part and each limit quickly, and not each with each.
FORMULAS = [
    pytest.param(
        *PARTS[name],
        NARROW if limits == "narrow" else {},
        id=f"{limits}-{name}",
        marks=pytest.mark.slow if limits == "narrow" and name != "default" else (),
    )
    for limits in ("wide", "narrow")
    for name in PARTS
]


@pytest.mark.parametrize(("options", "own", "limits"), FORMULAS)
def test_is_its_formula(options, own, limits):
    """In float64 NumPy, with an exact exchange so that no sign is undecided."""
    freeze, lr, decay = 12, 0.05, 0.5
    moments = {"b1": 0.8, "b2": 0.95, "eps": 1e-3}
    tx = onebit_lamb(
        lr, exact_mean("data"), freeze_at(freeze), **moments, **options, **limits,
        weight_decay=decay, mask=DECAYED,
    )  # fmt: skip
    params = tree_of(0) | {"bias": jnp.zeros(17)}
    expected = {k: np.asarray(p, float) for k, p in params.items()}
    leaves = {
        k: formula_lamb.Leaf(
            s, *moments.values(), freeze, (i, SHAPES.values()),
            weight_decay=decay * DECAYED[k], **own, **limits,
        )
        for i, (k, s) in enumerate(SHAPES.items())
    }  # fmt: skip
    run, factors, bounded = Workers(tx, params, mesh_of(WORKERS)), [], 0
    size = sum(p.size for p in params.values())
    for step in range(100):
        gradients = uneven_gradients(step, freeze)
        updates = run.update(gradients, params)
        params = optax.apply_updates(params, updates)
        for k, leaf in leaves.items():
            update = leaf.update(gradients[k].astype(float), expected[k])
            expected[k] = expected[k] - lr * update
            np.testing.assert_allclose(
                params[k], expected[k], err_msg=f"{k} after step {step + 1}",
                rtol=1e-4, atol=1e-4 * np.abs(expected[k]).max(),
            )  # fmt: skip
        state = run.state[0]
        for number, leaf in zip(state.factor, leaves.values(), strict=True):
            np.testing.assert_allclose(number, leaf.factor, rtol=1e-4)
        count = sum(leaf.bounded for leaf in leaves.values())
        np.testing.assert_allclose(state.bounded, count / size, rtol=1e-6)
        bounded += count
        if step == freeze - 1:
            of_all = formula_lamb.magnitudes([leaf.m for leaf in leaves.values()])
        factors.append(np.asarray(state.factor))
    for moment, its in {"mu": "m", "nu": "v", "nu_fresh": "fresh"}.items():
        for k, leaf in leaves.items():
            x = getattr(leaf, its)
            np.testing.assert_allclose(
                getattr(state, moment)[k], x, rtol=1e-5, atol=1e-6 * np.abs(x).max()
            )
    np.testing.assert_allclose(state.magnitude, of_all, rtol=1e-3)
    raised = sum(leaf.raised for leaf in leaves.values())
    np.testing.assert_allclose(state.floored, raised / size, rtol=1e-6)
    # The gradients are such that each part and each limit changes something.
    assert (raised > 0) == (not options)
    assert (bounded > 0) == (options != PUBLISHED)
    clipped = {
        end
        for leaf in leaves.values()
        for ratio in leaf.ratios
        for end in (0, 1)
        if ratio == leaf.ratio_limits[end]
    }
    assert len(clipped) == 2 or not limits
    change = np.array(factors[freeze:]) / np.array(factors[freeze - 1 : -1]) - 1
    most = leaves["bias"].factor_change
    np.testing.assert_allclose(np.abs(change).max(), most, rtol=1e-4)
    if not limits:
        assert (np.min(factors), np.max(factors)) == (0.5, 4.0)


def test_before_the_freeze_it_is_optaxs_on_the_mean():
    def schedule(count):
        return 0.01 / (1.0 + jnp.asarray(count, jnp.float32) / 50)

    options = {"weight_decay": 0.1, "mask": DECAYED, "b1": 0.5}
    ours = theirs = tree_of(0) | {"bias": jnp.zeros(17)}
    limits = {"ratio_limits": (0, 1e6)}
    tx = onebit_lamb(schedule, sign_mean("data"), freeze_at(1000), **options, **limits)
    run = Workers(tx, ours, mesh_of(WORKERS), stage="warmup")
    # Optax's own arithmetic mixes integers and floats.
    with jax.numpy_dtype_promotion("standard"):
        exact = optax.lamb(schedule, **options)
        state, update = exact.init(theirs), jax.jit(exact.update)
        for step in range(50):
            own = tree_of(step, WORKERS)
            if step < 5:  # its update is zero
                own["scale"] *= 0
            ours = optax.apply_updates(ours, run.update(own, ours))
            mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), own)
            updates, state = update(mean, state, theirs)
            theirs = optax.apply_updates(theirs, updates)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=2e-6)


def alone(tx, stage=None):
    """The update of workers without a mesh, where it is the same for all."""
    update = functools.partial(tx.update, stage=stage)
    each = jax.vmap(update, in_axes=(0, None, None), out_axes=None, axis_name="data")
    return jax.jit(each)


def test_the_factor_keeps_its_limits_under_wild_gradients():
    change, limits = 0.3, (0.25, 2.0)
    tx = onebit_lamb(
        0.1, exact_mean("data"), freeze_at(4), b2=0.6, eps=1e-8,
        weight_decay=0.1, factor_limits=limits, factor_change=change,
    )  # fmt: skip
    rng, params = np.random.default_rng(0), tree_of(0)
    update, state, factors = alone(tx), tx.init(params), []
    for step in range(120):
        wild = 10.0 ** rng.uniform(-12, 12) if step >= 4 else 1.0
        own = jax.tree.map(lambda g, w=wild: g * np.float32(w), tree_of(step, WORKERS))
        updates, state = update(own, state, params)
        params = optax.apply_updates(params, updates)
        factors.append(np.asarray(state[0].factor, float))
    factors = np.array(factors)
    assert (factors[:4] == 1).all()
    assert factors.min() == limits[0]
    assert factors.max() == limits[1]
    steps = factors[1:] / factors[:-1]
    np.testing.assert_allclose(steps.max(), 1 + change, rtol=1e-6)
    np.testing.assert_allclose(steps.min(), 1 - change, rtol=1e-6)
    assert all(np.isfinite(p).all() for p in params.values())


@pytest.mark.parametrize("bias_correction", [True, False])
def test_layers_of_zeros_have_the_ratio_one(bias_correction):
    """Weights that start from zero, and gradients that come after the freeze."""
    tx = onebit_lamb(
        0.1, exact_mean("data"), freeze_at(2), eps=1.0, ratio_limits=(0.2, 0.3),
        bias_correction=bias_correction,
    )  # fmt: skip
    params = {"empty": jnp.zeros((0, 3)), "late": jnp.ones(3), "new": jnp.zeros(3)}
    update, state = alone(tx), tx.init(params)
    for step in range(4):
        on = {"empty": 0.0, "late": float(step >= 2), "new": 1.0}
        own = {k: jnp.full((2, *p.shape), on[k]) for k, p in params.items()}
        updates, state = update(own, state, params)
        chex.assert_tree_all_finite((updates, state))
        if step == 0:
            direction = 0.5 if bias_correction else 0.1 / (np.sqrt(1e-3) + 1)
            np.testing.assert_allclose(updates["new"], -0.1 * direction, rtol=1e-5)
        params = optax.apply_updates(params, updates)
    # The ratio of the second step, clipped, is all that is counted of "new".
    _, _, new = state[0].ratio / state[0].ratio_weight
    np.testing.assert_allclose(new, 0.2, rtol=1e-6)
    assert np.all(np.asarray(params["late"]) < 1) == bias_correction


def test_layers_are_exchanged_at_one_magnitude():
    """Of one scale for all, that of the largest layer would be all that is seen."""
    sizes = {"large": 1e3, "none": 0.0, "small": 1e-3, "tiny": 1e-12}
    tx = onebit_lamb(
        0.1, onebit_jax.deepspeed_sign_mean("data", fused=True), freeze_at(1), b1=0.5
    )
    params = {k: jnp.ones(64) for k in sizes}
    run, rng = Workers(tx, params, mesh_of(2)), np.random.default_rng(0)
    signs = {k: rng.choice([-1.0, 1.0], size=64) for k in sizes}
    own = {k: jnp.asarray([size * signs[k]] * 2, "f4") for k, size in sizes.items()}
    for _ in range(4):
        run.update(own, params)
    factors = dict(zip(sizes, run.state[0].magnitude, strict=True))
    mean = sum(0.5 * size for size in sizes.values()) / 3
    for k in ("large", "small"):
        np.testing.assert_allclose(factors[k], mean / (0.5 * sizes[k]), rtol=1e-5)
        mu = np.asarray(run.state[0].mu[k])
        assert np.mean(np.sign(mu) == signs[k]) > 0.95
        assert 0.3 * sizes[k] < np.abs(mu).mean() < 3 * sizes[k]
    assert factors["none"] == factors["tiny"] == 1


def trained(tx, steps, **options):
    run = Workers(tx, tree_of(0), mesh_of(WORKERS), **options)
    for step in range(steps):
        run.update(tree_of(1 + step, WORKERS), tree_of(0))
    return run


FROZEN = ("nu", "frozen_at", "floored", "magnitude", "ratio", "ratio_weight")


def test_a_static_stage_in_the_wrong_place_still_makes_sense():
    tx = onebit_lamb(
        0.1, sign_mean("data", block_size=32), freeze_at(3), weight_decay=0.1
    )
    run = trained(tx, 2)
    short = run.state
    for step in range(2, 5):
        run.update(tree_of(1 + step, WORKERS), tree_of(0))
    # A program of the warm-up that runs on: exact, with what is frozen left so.
    late = Workers(tx, tree_of(0), mesh_of(WORKERS), stage="warmup")
    exact = onebit_lamb(0.1, exact_mean("data"), freeze_at(3), weight_decay=0.1)
    whole = Workers(exact, tree_of(0), mesh_of(WORKERS))
    late.state = run.state
    errors = whole.state[0].exchange
    whole.state = (run.state[0]._replace(exchange=errors), *run.state[1:])
    own = tree_of(99, WORKERS)
    chex.assert_trees_all_close(
        *(each.update(own, tree_of(0)) for each in (late, whole)), rtol=1e-4, atol=1e-6
    )
    for kept in (*FROZEN, "exchange"):
        before, after = (getattr(each.state[0], kept) for each in (run, late))
        chex.assert_trees_all_equal(after, before)
    assert not np.array_equal(late.state[0].factor, run.state[0].factor)
    assert onebit_jax.steps_by_stage(late.state) == {"warmup": 4, "compressed": 2}
    # A program of the compression that starts early: it freezes first.
    early = Workers(tx, tree_of(0), mesh_of(WORKERS), stage="compressed")
    early.state = short
    early.update(own, tree_of(0))
    state, before = early.state[0], short[0]
    chex.assert_trees_all_equal(state.nu, before.nu)
    chex.assert_trees_all_equal(state.ratio, before.ratio)
    assert int(state.frozen_at) == 2
    assert not np.array_equal(state.magnitude, before.magnitude)
    # Its fresh variance goes on from the frozen one.
    assert all(
        np.all(w >= 0.998 * v)
        for w, v in zip(*map(jax.tree.leaves, (state.nu_fresh, state.nu)), strict=True)
    )
    told = onebit_jax.steps_by_stage(early.state)
    assert {k: int(v) for k, v in told.items()} == {"warmup": 2, "compressed": 1}


def test_a_row_without_gradients_does_not_run_away():
    """Its frozen variance is zero: a step of it was 1e5 learning rates long."""
    lr, rows = 0.01, 6
    tx = onebit_lamb(lr, sign_mean("data", block_size=64), freeze_at(10))
    params = jnp.ones((rows, 50))
    run, rng = Workers(tx, params, mesh_of(WORKERS)), np.random.default_rng(0)
    for step in range(60):
        g = rng.normal(0.2, 1, size=(WORKERS, rows, 50))
        g[:, 2] = 0 if step < 30 else np.abs(g[:, 2])
        before = params
        updates = run.update(jnp.asarray(g, jnp.float32), params)
        params = optax.apply_updates(params, updates)
        state = run.state[0]
        ratio = float(state.ratio[0] / state.ratio_weight[0]) if step else 10.0
        largest = 3 * lr * ratio * float(state.factor[0])
        if step >= 10:
            assert np.abs(np.asarray(params - before)).max() <= 1.001 * largest
    assert np.all(np.asarray(params[2]) < 0.95), "the row must learn"
    told = onebit_jax.metrics(run.state)
    np.testing.assert_allclose(told["floored_share"], 1 / rows, rtol=1e-6)
    assert told["largest_factor"] == state.factor.max()
    norm = np.linalg.norm(np.asarray(state.magnitude)[0] * np.asarray(state.mu))
    errors = np.asarray(state.exchange.server_error.value)
    np.testing.assert_allclose(
        told["server_error"], np.linalg.norm(errors) / norm, rtol=1e-5
    )


def test_inside_optaxs_wrappers_it_is_as_alone():
    """With hyperparameters in the state, 16-bit parameters, and a schedule of decay."""

    def decay(count):
        return 0.1 / (1.0 + jnp.asarray(count, jnp.float32))

    make = functools.partial(
        onebit_lamb,
        exchange=sign_mean("data", block_size=32),
        freeze=freeze_at(3),
        mask=DECAYED,
    )
    options = {"learning_rate": 0.1, "b2": 0.99, "weight_decay": decay}
    params = tree_of(0, dtype=jnp.bfloat16)
    own = [tree_of(1 + step, WORKERS, jnp.bfloat16) for step in range(6)]
    with jax.numpy_dtype_promotion("standard"):
        inject = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)
        nested = Workers(
            onebit_jax.skip_nonfinite(inject(**options), "data"),
            params,
            mesh_of(WORKERS),
        )
        found = [nested.update(each, params) for each in own]
    run = Workers(make(**options), params, mesh_of(WORKERS))
    expected = [run.update(each, params) for each in own]
    for updates, others in zip(found, expected, strict=True):
        assert {u.dtype for u in others.values()} == {jnp.dtype(jnp.bfloat16)}
        float32 = optax.tree.cast((updates, others), jnp.float32)
        chex.assert_trees_all_close(*float32, rtol=0.02, atol=1e-6)
    state = run.state[0]
    for x in jax.tree.leaves((state.mu, state.nu, state.nu_fresh)):
        assert x.dtype == jnp.float32
    assert int(onebit_jax.metrics(nested.state)["count"]) == 6


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"exchange": "data"}, TypeError, "needs an exchange"),
        ({"freeze": 10}, TypeError, "needs a freeze rule"),
        ({"floor": 1e-6}, TypeError, "floor must be a FloorAtMean"),
        ({"ratio_limits": (1.0, 0.1)}, ValueError, "ratio_limits must be two numbers"),
        ({"factor_limits": (-1, 1)}, ValueError, "factor_limits must be two numbers"),
        ({"ratio_decay": 1.0}, ValueError, "ratio_decay must be"),
        ({"factor_change": -0.1}, ValueError, "factor_change must not be negative"),
        ({"bound": 0.0}, ValueError, "bound must be more than 0"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_arguments_are_refused(wrong, error, message):
    right = {"exchange": sign_mean("data"), "freeze": freeze_at(10)}
    with pytest.raises(error, match=message):
        onebit_lamb(0.1, **(right | wrong))


def test_it_needs_parameters():
    tx = onebit_lamb(0.1, exact_mean("data"), freeze_at(10))
    with pytest.raises(ValueError, match="needs the parameters"):
        alone(tx)(jnp.ones((2, 3)), tx.init(jnp.ones(3)), None)


def test_a_freeze_before_the_learning_rate_has_risen_is_warned_of():
    rising = optax.linear_schedule(0.0, 1e-3, 100)
    with pytest.warns(UserWarning, match="learning rate still rises"):
        onebit_lamb(rising, sign_mean("data"), freeze_at(50))
