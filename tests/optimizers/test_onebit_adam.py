"""1-bit Adam: what it equals, what it promises, and where it can stand."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import (
    Exchange,
    exact_mean,
    freeze_at,
    onebit_adam,
    onebit_adamw,
    sign_mean,
)

SHAPES = {"kernel": (30, 17), "bias": (17,), "scale": ()}


def params_of(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in SHAPES.items()}


def gradients_of(step, workers=4, dtype=jnp.float32):
    rng = np.random.default_rng(1000 + step)
    return {
        k: jnp.asarray(rng.normal(0.1, 1, size=(workers, *s)), dtype)
        for k, s in SHAPES.items()
    }


def train(tx, steps, params=None, workers=4, axis_type=AxisType.Auto, **update_args):
    """Runs a transformation and applies its updates; returns all parameters."""
    params = params_of() if params is None else params
    dtype = params["kernel"].dtype
    mesh = mesh_of(workers, axis_type)
    params = jax.device_put(params, jax.NamedSharding(mesh, PartitionSpec()))
    run = Workers(tx, params, mesh, **update_args)
    trajectory = []
    for step in range(steps):
        updates = run.update(gradients_of(step, workers, dtype), params)
        params = optax.apply_updates(params, updates)
        trajectory.append(params)
    return trajectory, run


def adamw_on_the_mean(tx, steps):
    # Optax's own arithmetic mixes integers and floats.
    with jax.numpy_dtype_promotion("standard"):
        params, trajectory = params_of(), []
        state, update = tx.init(params), jax.jit(tx.update)
        for step in range(steps):
            mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), gradients_of(step))
            updates, state = update(mean, state, params)
            params = optax.apply_updates(params, updates)
            trajectory.append(params)
    return trajectory, state


def schedule(count):
    return 0.01 / (1.0 + jnp.asarray(count, jnp.float32) / 50)


def test_before_the_freeze_it_is_optax_adamw():
    decays = {"kernel": True, "bias": False, "scale": False}
    ours, run = train(
        onebit_adamw(
            schedule, sign_mean("data"), freeze_at(1000), weight_decay=0.1, mask=decays
        ),
        200,
    )
    theirs, state = adamw_on_the_mean(
        optax.adamw(schedule, weight_decay=0.1, mask=decays), 200
    )
    for a, b in zip(ours, theirs, strict=True):
        chex.assert_trees_all_close(a, b, rtol=2e-6, atol=2e-6)
    for name in ("mu", "nu", "count"):
        chex.assert_trees_all_close(
            optax.tree.get(run.state[0], name),
            optax.tree.get(state[0], name),
            rtol=1e-5,
            atol=1e-7,
        )


def growing_gradients(step):
    """Tripled after the freeze, zero in three rows before it, and once with a spike.

    After the freeze some rows and columns grow by more.
    """
    gradients = gradients_of(step)
    if step >= 10:
        gradients = {k: 3 * g for k, g in gradients.items()}
        rows = jnp.linspace(0.2, 4, 30)[None, :, None]
        gradients["kernel"] *= rows * jnp.linspace(3, 0.3, 17)[None, None]
        spike = gradients["kernel"].at[:, 5, 0].set(1e4 if step == 20 else 0.0)
        return {**gradients, "kernel": spike}
    return {**gradients, "kernel": gradients["kernel"].at[:, :3].set(0)}


def shares_of(lines):
    """Shares of 30 rows, and of 17 columns beside their mean."""
    return np.concatenate([lines[:30], lines[30:] / np.mean(lines[30:])])


def known(shares):
    return np.where(shares < 1e-6, 1.0, shares)


@pytest.mark.parametrize("as_published", [True, False])
def test_after_the_freeze_it_is_its_formula(as_published):
    """Against float64 NumPy, with an exact exchange so that no sign is undecided."""
    b1, b2, eps, freeze, lr, delay = 0.8, 0.95, 1e-3, 10, 0.1, 1.5
    exact = exact_mean("data")
    tx = onebit_adam(
        lr,
        Exchange(exact.init, exact.update, exact.axes, delay=delay),
        freeze_at(freeze),
        b1,
        b2,
        eps,
        **(onebit_jax.AS_PUBLISHED if as_published else {}),
    )
    run, params = Workers(tx, params_of(), mesh_of(4)), params_of()
    trajectory = []
    for step in range(40):
        updates = run.update(growing_gradients(step), params)
        params = optax.apply_updates(params, updates)
        trajectory.append(params)
    bounded = 0
    for name in SHAPES:
        p = np.asarray(params_of()[name], float)
        m, momentum, v = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
        power, frozen_power = 0.0, np.nan
        own_lines, lines, frozen_lines = np.zeros((4, 47)), np.zeros(47), np.zeros(47)
        for step in range(40):
            own = np.asarray(growing_gradients(step)[name], float)
            g = np.mean(own, axis=0)
            m = b1 * m + (1 - b1) * g
            last, momentum = momentum, m / (1 - b1 ** (step + 1))
            power = b2 * power + (1 - b2) * np.mean(own**2)
            if name == "kernel":
                squares = np.concatenate([np.mean(own**2, a) for a in (2, 1)], axis=1)
                own_lines = b2 * own_lines + (1 - b2) * squares
                agreed = np.mean(own_lines, axis=0) / power
                # After the freeze two of the 47 a step: all of them in 32.
                first = min((step + 1) % 32 * 2, 45)
                now = slice(first, first + 2) if step >= freeze else slice(None)
                lines[now] = agreed[now]
            steps = min(step + 1, freeze)
            growth = 1.0
            if step < freeze:
                v = b2 * v + (1 - b2) * g**2
            elif not as_published:
                growth = power / (1 - b2 ** (step + 1)) / frozen_power
                if name == "kernel":
                    shares = shares_of(lines) / known(shares_of(frozen_lines))
                    shares = np.outer(shares[:30], shares[30:])
                    growth = growth * np.maximum(shares, 0.25)
            corrected = growth * v / (1 - b2**steps)
            led = step >= freeze and not as_published
            ahead = momentum + delay * (momentum - last) if led else momentum
            u = ahead / (np.sqrt(corrected) + eps)
            if led:
                bounded += np.sum(np.abs(u) > 3)
                u = np.clip(u, -3, 3)
            p = p - lr * u
            if step == freeze - 1:
                frozen_power, frozen_lines = power / (1 - b2**freeze), lines.copy()
                if not as_published:
                    raised = np.mean(v)
                    if name == "kernel":
                        shares = known(shares_of(lines))
                        raised = raised * np.outer(shares[:30], shares[30:])
                    v = np.where(v < 1e-6 * np.mean(v), raised, v)
            np.testing.assert_allclose(
                trajectory[step][name], p, rtol=1e-4, atol=1e-4 * np.abs(p).max()
            )
        np.testing.assert_allclose(run.state[0].nu[name], v, rtol=1e-5)
    assert int(run.state[0].frozen_at) == freeze
    share = 0 if as_published else 3 * 17 / (30 * 17 + 17 + 1)
    np.testing.assert_allclose(run.state[0].floored, share, rtol=1e-6)
    assert as_published or bounded > 0


def test_it_freezes_when_its_own_variance_is_stable():
    """The rule sees the 1-norm of the bias-corrected variance of all leaves."""
    interval, b2 = 4, 0.9
    rule = onebit_jax.freeze_when_stable(min_steps=1, interval=interval)
    tx = onebit_adam(0.1, sign_mean("data"), rule, b2=b2)
    run = Workers(tx, params_of(), mesh_of(2))
    signs = jax.tree.map(jnp.sign, gradients_of(0, 2))
    same = {k: jnp.stack([s[0]] * 2) for k, s in signs.items()}
    for factors in ([1.0] * 8, [2.0**t for t in range(8)] + [128.0] * 40):
        run.state = onebit_jax.init(tx, params_of(), mesh_of(2))
        variance, norms, expected = 0.0, [], 0
        for t, factor in enumerate(factors, start=1):
            variance = b2 * variance + (1 - b2) * factor**2
            norms.append(variance / (1 - b2**t))
            if not expected and t > interval:
                ratio = norms[-1] / norms[-1 - interval]
                expected = t if min(ratio, 1 / ratio) >= 0.96 else 0
            run.update(jax.tree.map(lambda s, f=factor: s * f, same))
        assert expected == interval + 1 if len(factors) == 8 else expected > 20
        assert int(run.state[0].frozen_at) == expected


@pytest.mark.parametrize("stage", ["warmup", "compressed"])
def test_a_static_stage_is_the_same_stage(stage):
    tx = onebit_adam(0.1, sign_mean("data", block_size=32), freeze_at(5))
    both, _ = train(tx, 10)
    one = Workers(tx, params_of(), mesh_of(4), stage=stage)
    params, steps = params_of(), range(5)
    if stage == "compressed":
        start, first = train(tx, 5)
        one.state, params, steps = first.state, start[-1], range(5, 10)
    for step in steps:
        params = optax.apply_updates(params, one.update(gradients_of(step), params))
        chex.assert_trees_all_close(params, both[step], rtol=1e-6, atol=1e-7)
    assert int(one.state[0].frozen_at) == 5


def test_a_static_stage_in_the_wrong_place_still_makes_sense():
    tx = onebit_adam(0.1, sign_mean("data", block_size=32), freeze_at(5))
    _, run = train(tx, 7)
    # A program of the warm-up that runs on: exact, with the variance left frozen.
    late = Workers(tx, params_of(), mesh_of(4), stage="warmup")
    late.state = run.state
    late.update(gradients_of(7), params_of())
    for kept in ("nu", "frozen_power", "floored", "frozen_at", "exchange"):
        before, after = (getattr(r.state[0], kept) for r in (run, late))
        chex.assert_trees_all_equal(after, before)
    # A program of the compression that starts early: it freezes first.
    _, short = train(tx, 2)
    early = Workers(tx, params_of(), mesh_of(4), stage="compressed")
    early.state = short.state
    early.update(gradients_of(2), params_of())
    chex.assert_trees_all_equal(early.state[0].nu, short.state[0].nu)
    assert int(early.state[0].frozen_at) == 2


def test_a_late_program_of_the_warm_up_follows_the_power_too():
    """What woke after the freeze has a variance of zero, and has grown by infinity."""
    tx = onebit_adam(0.1, exact_mean("data"), freeze_at(3))
    silent = {**gradients_of(0), "bias": jnp.zeros((4, *SHAPES["bias"]))}
    both, late = (
        Workers(tx, params_of(), mesh_of(4), **stage)
        for stage in ({}, {"stage": "warmup"})
    )
    for step in range(6):
        grown = {k: 5 * g for k, g in gradients_of(step).items()}
        gradients = silent if step < 4 else grown
        updates, own = (run.update(gradients, params_of()) for run in (both, late))
        assert max(np.abs(u).max() for u in own.values()) <= 0.3
        # The power of a kernel's lines is exchanged in another number of steps.
        del own["kernel"], updates["kernel"]
        chex.assert_trees_all_close(own, updates, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wakes", [None, 15])
def test_a_row_without_gradients_does_not_run_away(wakes):
    """Its frozen variance is zero; DeepSpeed moved it by 1e5 in one step."""
    lr, rows = 0.01, 6
    tx = onebit_adam(lr, sign_mean("data", block_size=64), freeze_at(10))
    params = jnp.zeros((rows, 50))
    run = Workers(tx, params, mesh_of(4))
    rng = np.random.default_rng(0)
    for step in range(60):
        g = rng.normal(0.2, 1, size=(4, rows, 50))
        g[:, 2] = 0 if wakes is None or step < wakes else np.abs(g[:, 2])
        before = params
        updates = run.update(jnp.asarray(g, jnp.float32), params)
        params = optax.apply_updates(params, updates)
        moved = np.abs(np.asarray(params - before))
        assert moved.max() <= 3 * lr * 1.001
    if wakes is None:
        # Error feedback takes its steps back: no drift.
        assert np.abs(params[2]).max() < 10 * lr
    else:
        assert np.all(np.asarray(params[2]) < -10 * lr), "the row must learn"


def test_a_leaf_that_wakes_after_the_freeze_settles():
    """Its own variance was zero: only its power since then can say how far to go."""
    tx = onebit_adam(0.01, sign_mean("data"), freeze_at(10))
    params = {"early": jnp.full(50, 0.5), "late": jnp.full(50, 0.5)}
    run = Workers(tx, params, mesh_of(4))
    rng = np.random.default_rng(0)
    for step in range(400):
        noise = rng.normal(0, 0.1, size=(2, 4, 50)).astype(np.float32)
        g = {k: params[k][None] + n for k, n in zip(params, noise, strict=True)}
        if step < 20:
            g["late"] = jnp.zeros((4, 50))
        updates = run.update(g, params)
        params = optax.apply_updates(params, updates)
    # Without its power every step would be 3 learning rates long, for ever.
    assert np.abs(updates["late"]).max() < 0.01
    assert np.abs(params["late"]).max() < 0.05


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_parameters_have_float32_moments(dtype):
    tx = onebit_adam(0.01, sign_mean("data"), freeze_at(3))
    trajectory, run = train(tx, 6, params_of(dtype=dtype))
    assert all(p.dtype == dtype for p in trajectory[-1].values())
    for moment in (run.state[0].mu, run.state[0].nu):
        assert {m.dtype for m in moment.values()} == {jnp.dtype(jnp.float32)}
    full, _ = train(tx, 6)
    unit = float(jnp.finfo(dtype).eps)
    for name in SHAPES:
        a, b = (np.asarray(t[-1][name], np.float32) for t in (trajectory, full))
        # A step may take another sign where rounding decides it, not more.
        np.testing.assert_allclose(a, b, atol=6 * unit * 4 + 0.03, rtol=0)


def test_explicit_axes_agree_with_automatic_ones():
    tx = onebit_adam(0.1, sign_mean("data", block_size=32), freeze_at(3))
    auto, _ = train(tx, 6)
    explicit, _ = train(tx, 6, axis_type=AxisType.Explicit)
    chex.assert_trees_all_equal(jax.device_get(auto[-1]), jax.device_get(explicit[-1]))


def test_inside_masked_a_leaf_passes_untouched():
    inner = onebit_adam(0.1, sign_mean("data"), freeze_at(2))
    frozen = {"kernel": True, "bias": True, "scale": False}
    # A masked-out leaf stays as it is: the workers' own, so nothing may return it.
    tx = optax.chain(
        optax.masked(inner, frozen),
        optax.masked(
            optax.chain(exact_mean("data"), optax.set_to_zero()),
            {"kernel": False, "bias": False, "scale": True},
        ),
    )
    trajectory, _ = train(tx, 5)
    alone, _ = train(inner, 5)
    for a, b in zip(trajectory, alone, strict=True):
        chex.assert_trees_all_equal(a["kernel"], b["kernel"])
        chex.assert_trees_all_equal(a["scale"], params_of()["scale"])


def test_inside_partition_each_part_has_its_own_rule():
    labels = {"kernel": "bits", "bias": "exact", "scale": "exact"}
    make = functools.partial(onebit_adam, 0.1, sign_mean("data"))
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.partition(
            {
                "bits": make(freeze_at(2)),
                "exact": optax.chain(exact_mean("data"), optax.adam(0.1)),
            },
            labels,
        )
        trajectory, run = train(tx, 6)
        bits, _ = train(make(freeze_at(2)), 6)
        exact, _ = train(optax.chain(exact_mean("data"), optax.adam(0.1)), 6)
    for name, alone in {"kernel": bits, "bias": exact, "scale": exact}.items():
        # Other programs, other roundings.
        np.testing.assert_allclose(
            trajectory[-1][name], alone[-1][name], rtol=0, atol=1e-6
        )
    assert int(onebit_jax.metrics(run.state)["count"]) == 6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_inside_inject_hyperparams_a_schedule_is_followed(dtype):
    make = functools.partial(
        onebit_adamw, exchange=sign_mean("data", block_size=32), freeze=freeze_at(3)
    )
    with jax.numpy_dtype_promotion("standard"):
        injected = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(
            learning_rate=schedule, b2=0.99, weight_decay=0.1
        )
        trajectory, run = train(injected, 8, params_of(dtype=dtype))
        plain, _ = train(
            make(schedule, b2=0.99, weight_decay=0.1), 8, params_of(dtype=dtype)
        )
    close = functools.partial(chex.assert_trees_all_close, rtol=0)
    close(trajectory[-1], plain[-1], atol=1e-5 if dtype == jnp.float32 else 0.1)
    # The learning rate of the last of the eight steps.
    np.testing.assert_allclose(
        run.state.hyperparams["learning_rate"], schedule(7), rtol=1e-6
    )


def test_an_optimizer_can_be_made_while_it_is_traced():
    make = functools.partial(
        onebit_adam, exchange=sign_mean("data"), freeze=freeze_at(3)
    )
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.inject_hyperparams(make, static_args="learning_rate")(
            learning_rate=schedule, b1=0.8
        )
        injected, _ = train(tx, 5)
        plain, _ = train(make(schedule, b1=0.8), 5)
    chex.assert_trees_all_close(injected[-1], plain[-1], rtol=0, atol=1e-5)


def test_a_freeze_before_the_learning_rate_has_risen_is_warned_of():
    rising = optax.linear_schedule(0.0, 1e-3, 100)
    with pytest.warns(UserWarning, match="learning rate still rises"):
        onebit_adam(rising, sign_mean("data"), freeze_at(50))
    with pytest.warns(UserWarning, match="learning rate still rises"):
        onebit_adamw(
            rising,
            sign_mean("data"),
            onebit_jax.freeze_when_stable(min_steps=50, interval=10),
        )
    onebit_adam(rising, sign_mean("data"), freeze_at(100))  # a warning is an error
    # A schedule is given what Optax gives it, an array.
    onebit_adam(lambda t: -t.astype(jnp.float32), sign_mean("data"), freeze_at(1))


class StateTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_init_makes_the_state_that_update_keeps(self):
        tx = onebit_adam(0.1, sign_mean("data"), freeze_at(3))
        mesh = mesh_of(4)
        with jax.set_mesh(mesh):
            state = self.variant(tx.init)(params_of())
        run = Workers(tx, params_of(), mesh)
        chex.assert_trees_all_equal(state, run.state)
        run.update(gradients_of(0), params_of())
        chex.assert_trees_all_equal_shapes_and_dtypes(state, run.state)
        chex.assert_trees_all_equal_structs(state, run.state)

    def test_init_works_on_shapes_alone(self):
        tx = onebit_adam(0.1, sign_mean("data"), freeze_at(3))
        shapes = jax.eval_shape(params_of)
        with jax.set_mesh(mesh_of(4)):
            chex.assert_trees_all_equal(tx.init(shapes), tx.init(params_of()))
