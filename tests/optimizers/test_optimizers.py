"""The promises of every optimizer, asked of a table of them."""

import functools
import inspect
from collections import Counter

import chex
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers.cases import (
    CASES,
    DECAYED,
    FORMULAS,
    FREEZE,
    LONGEST,
    SHAPES,
    made,
    maker,
    moment_of,
    moments_of,
    replicated_of,
    residuals_of,
    tree_of,
)
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import freeze_at
from onebit_jax.optimizers.parts.moments import as_float32

WORKERS, STEPS = 4, 8
DTYPES = {k: jnp.bfloat16 if k == "matrix" else jnp.float32 for k in SHAPES}
mixed = functools.partial(tree_of, dtypes=DTYPES)
# Forms of optimizers that other rows are asked of; files that follow DeepSpeed's and
# the paper's trajectories hold them in every run of the tests.
FORMS = ("1-bit Adam as published", "0/1 Adam as DeepSpeed's")


def of_cases(asked=lambda case: True):
    """A test for each row of which it can be asked; of `FORMS` among the slow ones."""
    slow = {name: [pytest.mark.slow] for name in FORMS}
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=slow.get(name, []))
            for name, case in CASES.items()
            if asked(case)
        ],
    )


each_case = of_cases()
each_with_stages = of_cases(lambda case: case.stage)
each_that_freezes = of_cases(lambda case: case.stage and case.freezes)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def uneven_gradients(step, freeze):
    """Tripled after the freeze, with rows of zeros before or after, and one spike."""
    gradients = jax.tree.map(np.array, tree_of(1000 + step, WORKERS))
    kernel, bias = gradients["kernel"], gradients["bias"]
    gradients["matrix"] *= 0.01
    if step < freeze:
        kernel[:, :3] = 0
        return gradients
    kernel[:, 5, 0] = 1e4 if step == freeze + 9 else 0.0
    kernel[:, 8:10] = 0
    bias *= 2
    return {k: np.float32(3 * g) for k, g in gradients.items()}


@pytest.mark.parametrize("name", FORMULAS)
def test_is_its_formula(name):
    """In float64 NumPy, with an exact exchange so that no sign is undecided."""
    case, freeze, lr, decay = FORMULAS[name], 12, 0.05, 0.5
    tx = made(
        case, freeze, learning_rate=lr, exchange=case.exact, weight_decay=decay,
        mask=DECAYED, **case.decays,
    )  # fmt: skip
    params = tree_of(0) | {"bias": jnp.zeros(17)}
    run = Workers(tx, params, mesh_of(WORKERS))
    expected = {k: np.asarray(p, float) for k, p in params.items()}
    leaves = {
        k: case.leaf(s, (i, SHAPES.values()), freeze, decay * DECAYED[k], **case.decays)
        for i, (k, s) in enumerate(SHAPES.items())
    }
    for step in range(LONGEST):
        gradients = uneven_gradients(step, freeze)
        params = optax.apply_updates(params, run.update(gradients, params))
        for k, leaf in leaves.items():
            update = leaf.update(gradients[k].astype(float), expected[k])
            expected[k] = expected[k] - lr * update
            np.testing.assert_allclose(
                params[k], expected[k], err_msg=f"{k} after step {step + 1}",
                rtol=1e-4, atol=1e-4 * np.abs(expected[k]).max(),
            )  # fmt: skip
    if case.stage:
        taken = Counter(case.stage(step, freeze) for step in range(LONGEST))
        steps = onebit_jax.steps_by_stage(run.state)
        assert {stage: int(n) for stage, n in steps.items() if n} == taken
    if case.stage and case.freezes:
        raised = sum(leaf.raised for leaf in leaves.values())
        assert raised == (3 * 17 if "floor" in case.uses else 0)
        told = onebit_jax.metrics(run.state)["floored_share"]
        size = sum(p.size for p in params.values())
        np.testing.assert_allclose(told, raised / size, rtol=1e-6)
    for moment, (its, _) in case.moments.items():
        for k, leaf in leaves.items():
            x, y = moment_of(run.state, moment)[k], getattr(leaf, its)
            np.testing.assert_allclose(
                x, y, rtol=1e-5, atol=1e-6 * max(np.abs(y).max(), 1e-9)
            )
    # The gradients are such that each part and each limit changes something.
    assert case.uses <= set.union({"floor"}, *(leaf.used for leaf in leaves.values()))


def schedule(count):
    return 0.01 / (1.0 + jnp.asarray(count, jnp.float32) / 50)


@of_cases(lambda case: case.warmup)
def test_before_the_freeze_it_is_optaxs_on_the_mean(name):
    case = CASES[name]
    options = {"weight_decay": 0.1, "mask": DECAYED, "b1": 0.5}
    ours = theirs = tree_of(0) | {"bias": jnp.zeros(17)}
    tx = made(name, 1000, learning_rate=schedule, **options, **case.warmup_options)
    run = Workers(tx, ours, mesh_of(WORKERS), stage="warmup")
    # Optax's own arithmetic mixes integers and floats.
    with jax.numpy_dtype_promotion("standard"):
        exact = case.warmup(schedule, **options)
        state, update = exact.init(theirs), jax.jit(exact.update)
        for step in range(50):
            own = tree_of(step, WORKERS)
            if step < 45:  # then it moves by more than three learning rates
                own["scale"] *= 0
            updates = run.update(own, ours)
            ours = optax.apply_updates(ours, updates)
            mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), own)
            updates, state = update(mean, state, theirs)
            theirs = optax.apply_updates(theirs, updates)
    rtol = 2e-6 if case.warmup is optax.adamw else 1e-5
    chex.assert_trees_all_close(ours, theirs, rtol=rtol, atol=2e-6)
    assert int(moments_of(run.state).count) == 50
    for moment, (_, its) in case.moments.items():
        if its:
            chex.assert_trees_all_close(
                moment_of(run.state, moment), optax.tree.get(state[0], its),
                rtol=1e-5, atol=1e-7,
            )  # fmt: skip


def optimizer(name):
    return onebit_jax.skip_nonfinite(made(name, weight_decay=0.01), "data")


@functools.cache
def program(name, workers=WORKERS, check_vma=True, **extra):
    """A compiled step and its first state."""
    run = Workers(
        optimizer(name), mixed(0), mesh_of(workers), check_vma=check_vma, **extra
    )
    return run, run.state


@functools.cache
def traffic_of(name, **extra):
    return program(name, **extra)[0].traffic(mixed(0, WORKERS), mixed(0))


def trained(name, steps, own=lambda step: mixed(1 + step, WORKERS)):
    """Parameters and state before each step and after the last, of one program."""
    run, run.state = program(name)
    params = mixed(0)
    history = [(params, run.state)]
    for step in steps:
        params = optax.apply_updates(params, run.update(own(step), params))
        history.append((params, run.state))
    return history


@functools.cache
def history(name):
    return trained(name, range(STEPS))


@each_case
def test_resumes_from_numpy_arrays_at_any_step(name):
    run, _ = program(name)
    told = onebit_jax.abstract_state(optimizer(name), mixed(0), run.mesh)
    for step, (params, state) in enumerate(history(name)[:-1]):
        chex.assert_trees_all_equal_structs(told, state)
        for leaf, x in zip(*map(jax.tree.leaves, (told, state)), strict=True):
            assert (leaf.shape, leaf.dtype) == (x.shape, x.dtype)
            assert leaf.sharding.is_equivalent_to(x.sharding, x.ndim)
        saved = jax.tree.map(np.array, state)
        run.state = jax.tree.map(
            lambda x, leaf: jax.device_put(x, leaf.sharding), saved, told
        )
        params = jax.tree.map(jnp.asarray, jax.tree.map(np.array, params))
        updates = run.update(mixed(1 + step, WORKERS), params)
        after = optax.apply_updates(params, updates), run.state
        assert bits(after) == bits(history(name)[step + 1])


@each_case
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e25], ids=str)
@pytest.mark.parametrize("step", [0, FREEZE - 1, FREEZE, STEPS - 1])
def test_a_step_that_is_not_finite_changes_nothing(name, bad, step):
    run, _ = program(name)
    params, run.state = history(name)[step]
    params = params | {"bias": params["bias"].at[7].set(-0.0)}
    own = mixed(1 + step, WORKERS)
    before = bits((params, run.state.inner))
    spoiled = own | {"kernel": own["kernel"].at[2, 3, 4].set(bad)}
    after = optax.apply_updates(params, run.update(spoiled, params))
    assert bits((after, run.state.inner)) == before
    assert int(onebit_jax.metrics(run.state)["skipped"]) == 1


@each_case
def test_all_workers_hold_the_same_bits_and_moments_have_32(name):
    for params, state in history(name)[1:]:
        for x in jax.tree.leaves((params, replicated_of(state))):
            assert len({shard.data.tobytes() for shard in x.addressable_shards}) == 1
        assert {k: p.dtype for k, p in params.items()} == DTYPES
        moments = [moment_of(state, moment) for moment in CASES[name].moments]
        assert {x.dtype for x in jax.tree.leaves(moments)} == {np.dtype("f4")}


@each_with_stages
def test_static_stages_are_the_same_with_types_unchecked(name):
    """Each program has one stage, and sends what the whole one sends then."""
    whole, _ = program(name)
    both = traffic_of(name)
    stages = [CASES[name].stage(step, FREEZE) for step in range(STEPS)]
    known = list(onebit_jax.steps_by_stage(whole.state))
    assert set(stages) <= set(known) == set(both.stages)
    for stage in dict.fromkeys(stage.partition("/")[0] for stage in stages):
        run, _ = program(name, check_vma=False, stage=stage)
        for step in range(STEPS):
            if stages[step].partition("/")[0] != stage:
                continue
            params, run.state = history(name)[step]
            updates = run.update(mixed(1 + step, WORKERS), params)
            params = optax.apply_updates(params, updates)
            expected, state = history(name)[step + 1]
            for x, y in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
                unit = float(jnp.finfo(x.dtype).eps)
                np.testing.assert_allclose(
                    *(np.asarray(z, float) for z in (x, y)), rtol=4 * unit, atol=1e-6
                )
            chex.assert_trees_all_close(run.state, state, rtol=1e-5, atol=1e-6)
        one = traffic_of(name, check_vma=False, stage=stage)
        inside = [s for s in known if s.startswith(f"{stage}/")]
        assert set(one.stages) == {stage, *inside}
        for each in one.stages:
            assert one.sent_bytes(each) == both.sent_bytes(each)


@each_with_stages
def test_a_stage_that_cannot_be_the_next_is_refused(name):
    run = onebit_jax.data_parallel(lambda p, x: jnp.mean(x @ p), made(name), mesh_of(2))
    params, state = run.init(jnp.zeros(2))
    batch = jnp.array([[3.0, -5.0], [1.0, -1.0]])
    for step in range(FREEZE + 2):
        for stage in CASES[name].refused.get(step, ()):
            with pytest.raises(
                ValueError, match=r"(variance|due).* leave the stage out"
            ):
                run.step(params, state, batch, stage=stage)
        stage = CASES[name].stage(step, FREEZE).partition("/")[0]
        params, state, _ = run.step(params, state, batch, stage=stage)
        if CASES[name].freezes:
            frozen = step + 1 >= FREEZE
            assert int(onebit_jax.metrics(state)["compressed"]) == frozen


def payloads(collectives):
    """Bytes of each kind of collective."""
    sums = Counter()
    for each in collectives:
        sums[each.op] += each.bytes * each.times
    return sums


@each_case
def test_its_collectives_are_told_without_a_compilation(name):
    run, _ = program(name)
    traffic = traffic_of(name)
    told = onebit_jax.stage_costs(optimizer(name), mixed(0), {"data": WORKERS})
    assert list(told) == (list(onebit_jax.steps_by_stage(run.state)) or ["every"])
    for stage, transfers in told.items():
        found = payloads(
            c
            for c in traffic.collectives
            if c.stage == "every" or f"{stage}/".startswith(f"{c.stage}/")
        )
        costs = payloads(transfers)
        # Exact means of 16-bit values are of 32 bits on a CPU.
        exact = costs.pop("all-reduce"), found.pop("all-reduce")
        assert exact[0] <= exact[1] <= exact[0] + 2 * SHAPES["matrix"][0] * 20
        assert costs == found


COLLECTIVES = {"psum_invariant", "all_gather_invariant", "all_to_all", "pmin", "pmax"}


def programs_in(equation):
    """The programs of a choice, a loop or a call."""
    parts = jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
    )
    parts = (getattr(x, "jaxpr", x) for x in parts)
    return [x for x in parts if hasattr(x, "eqns")]


def communicates(equation):
    inside = (e for program in programs_in(equation) for e in program.eqns)
    return equation.primitive.name in COLLECTIVES or any(map(communicates, inside))


def unordered(jaxpr):
    """Choices and collectives beside them of which neither waits for the other."""
    waits, earlier, found = {}, [], []
    for equation in jaxpr.eqns:
        names = [x for x in equation.invars if isinstance(x, jax.extend.core.Var)]
        known = set().union(*(waits.get(x, set()) for x in names))
        if communicates(equation):
            for number, other in enumerate(earlier):
                kinds = other.primitive.name, equation.primitive.name
                if "cond" in kinds and number not in known:
                    found.append(kinds)
            known = known | {len(earlier)}
            earlier.append(equation)
        waits |= dict.fromkeys(equation.outvars, known)
        for program in programs_in(equation):
            found += unordered(program)
    return found


@each_case
def test_collectives_of_a_choice_and_beside_it_are_ordered(name):
    """XLA's CPU devices may else begin them in different orders, and mix them up."""
    tx, mesh, params = optimizer(name), mesh_of(2), tree_of(0)
    run = onebit_jax.data_parallel(
        lambda p, x: jnp.mean(x) * optax.tree.sum(p), tx, mesh
    )
    state = onebit_jax.abstract_state(tx, params, mesh)
    jaxpr = jax.make_jaxpr(run.step.jitted)(params, state, jnp.ones(2)).jaxpr
    assert any(map(communicates, jaxpr.eqns)), "nothing is looked at"
    assert not unordered(jaxpr)


def same_gradients(step, workers=WORKERS):
    one = mixed(1 + step, 1)
    return jax.tree.map(lambda g: jnp.repeat(g, workers, axis=0), one)


@functools.cache
def in_unison(name):
    return trained(name, range(STEPS), same_gradients)


def assert_residuals_are_kept(old, new):
    for x, y in zip(residuals_of(old), residuals_of(new), strict=True):
        size = min(x.size, y.size)
        x, y = (np.asarray(z, float).reshape(-1) for z in (x, y))
        np.testing.assert_allclose(y[:size], x[:size], rtol=1e-6, atol=1e-7)
        assert not x[size:].any()
        assert not y[size:].any()


@each_case
@pytest.mark.parametrize("step", [FREEZE - 1, STEPS - 2])
def test_other_workers_go_on_as_these(name, step):
    """Where all have the same gradients, their number does not matter."""
    params, state = in_unison(name)[step]
    run, _ = program(name, workers=2)
    run.state = onebit_jax.resize(
        state, optimizer(name), params, mesh_of(WORKERS), run.mesh
    )
    assert_residuals_are_kept(state, run.state)
    params = jax.device_put(params, jax.NamedSharding(run.mesh, jax.P()))
    params = optax.apply_updates(params, run.update(same_gradients(step, 2), params))
    expected = in_unison(name)[step + 1]
    for x, y in zip(*map(jax.tree.leaves, (params, expected[0])), strict=True):
        if CASES[name].by_chance:
            continue
        np.testing.assert_allclose(
            *(np.asarray(z, float) for z in (x, y)), rtol=0.01, atol=1e-5
        )
    for moment in CASES[name].moments:
        ours, theirs = (moment_of(x, moment) for x in (run.state, expected[1]))
        for k, x in ours.items():
            y = theirs[k] if theirs[k].shape == x.shape else theirs[k][:2]
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@each_case
def test_another_number_of_workers_keeps_the_residual(name):
    """In training, where the workers' errors differ."""
    params, state = history(name)[-1]
    assert sum(bool(jnp.any(x != 0)) for x in residuals_of(state)) >= 2, "no residual"
    for workers in (1, 3):
        new = onebit_jax.resize(
            state, optimizer(name), params, mesh_of(WORKERS), mesh_of(workers)
        )
        assert_residuals_are_kept(state, new)


@each_case
def test_init_needs_shapes_alone_and_may_be_compiled(name):
    tx, (run, state) = optimizer(name), program(name)
    with jax.set_mesh(run.mesh):
        made = jax.jit(tx.init)(mixed(0)), tx.init(jax.eval_shape(lambda: mixed(0)))
    for each in made:
        chex.assert_trees_all_equal(each, state)
    # A state with a buffer twice cannot be donated: XLA ends the process.
    with jax.set_mesh(mesh_of(1)):
        leaves = [x for x in jax.tree.leaves(tx.init(mixed(0))) if x.size]
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def updates_of(tx, params, own):
    run = Workers(tx, params, mesh_of(WORKERS))
    return [run.update(each, params) for each in own], run.state


@each_case
def test_inside_optaxs_wrappers_it_is_as_alone(name):
    """As a part of a partition, with numbers in the state and schedules."""
    params, own = tree_of(0), [tree_of(1 + step, WORKERS) for step in range(STEPS)]
    options = {
        "learning_rate": schedule,
        **CASES[name].decays,
        "weight_decay": schedule,
    }
    make = optax.inject_hyperparams(maker(name), hyperparam_dtype=jnp.float32)
    # Alone as in the partition: a leaf's place decides its random signs.
    labels = dict.fromkeys(SHAPES, "own") | {"scale": "exact"}
    exact = optax.chain(onebit_jax.exact_mean("data"), optax.sgd(0.1))
    parts = {"own": make(**options), "exact": exact}
    with jax.numpy_dtype_promotion("standard"):
        nested, state = updates_of(optax.partition(parts, labels), params, own)

    def without(tree):
        return {k: x for k, x in tree.items() if k != "scale"}

    alone = updates_of(made(name, **options), without(params), map(without, own))
    for found, expected, gradients in zip(nested, alone[0], own, strict=True):
        mean = jnp.mean(gradients["scale"])
        np.testing.assert_allclose(found.pop("scale"), -0.1 * mean, rtol=1e-5)
        chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)
    moved = onebit_jax.mean_params(params, state)
    np.testing.assert_array_equal(moved["scale"], params["scale"])
    expected = onebit_jax.mean_params(without(params), alone[1])
    chex.assert_trees_all_close(without(moved), expected, rtol=1e-4, atol=1e-6)


def traced(tx):
    """Shapes and dtypes of an update."""
    run = Workers(tx, tree_of(0), mesh_of(WORKERS))
    own = tree_of(1, WORKERS)
    return jax.eval_shape(run.compiled, own, run.state, tree_of(0))[0]


@each_case
def test_hyperparameters_may_be_arrays_of_another_dtype(name):
    """Under strict promotion, which refuses to mix them."""
    half = jnp.bfloat16(0.5)
    names = list(CASES[name].decays)
    if name.startswith("0/1 Adam"):  # the others leave these to Optax
        names += ["learning_rate", "weight_decay"]
    options = dict.fromkeys(names, half)
    if CASES[name].stage and CASES[name].freezes:
        options["compressed"] = onebit_jax.Compressed(
            lead=None, growth=None, bound=half
        )
    tx = made(name, **options)
    assert {u.dtype for u in traced(tx).values()} == {np.dtype("f4")}


@each_that_freezes
def test_a_freeze_before_the_learning_rate_has_risen_is_warned_of(name):
    rising = optax.linear_schedule(0.0, 1e-3, 100)
    stable = onebit_jax.freeze_when_stable(min_steps=50, interval=10)
    for freeze in (freeze_at(50), stable):
        with pytest.warns(UserWarning, match="learning rate still rises"):
            made(name, learning_rate=rising, freeze=freeze)
    made(name, 100, learning_rate=rising)  # a warning is an error
    # A schedule is given what Optax gives it, an array.
    made(name, learning_rate=lambda t: -t.astype(jnp.float32))
    # One of injected numbers is not looked at.
    tx = optax.inject_hyperparams(
        lambda peak: made(name, learning_rate=optax.linear_schedule(0.0, peak, 100))
    )(peak=1e-3)
    traced(tx)


@each_case
def test_what_it_cannot_use_is_refused(name):
    decay = "decay" if "decay" in CASES[name].decays else "b1"
    with pytest.raises(ValueError, match="give a pair of decays as b1 and b2"):
        made(name, **{decay: (0.9, 0.999)})
    with pytest.raises(TypeError, match="needs an exchange, such as"):
        made(name, exchange=optax.identity())
    with pytest.raises(TypeError, match="leaves only, but the only leaf is int32"):
        onebit_jax.init(made(name), jnp.zeros(3, jnp.int32), mesh_of(2))
    if CASES[name].stage and CASES[name].freezes:
        # A schedule is compared with the freeze: only once that is known to be one.
        for rate in (0.1, optax.linear_schedule(0.1, 0.0, 10)):
            with pytest.raises(TypeError, match=r"needs a freeze rule.*, got 10\.$"):
                made(name, learning_rate=rate, freeze=10)
        with pytest.raises(TypeError, match="compressed must be a Compressed, such as"):
            made(name, compressed=3.0)


@each_that_freezes
@pytest.mark.parametrize(
    "votes",
    [
        onebit_jax.vote_mean("data"),
        onebit_jax.random_vote_mean("data"),
        onebit_jax.hierarchical(onebit_jax.vote_mean("data"), "device"),
        onebit_jax.per_shard(onebit_jax.vote_mean("data"), jax.P("model")),
    ],
    ids=lambda votes: type(votes).__name__,
)
def test_votes_beside_a_variance_are_refused(name, votes):
    with pytest.raises(TypeError, match="votes have no scale: give it"):
        made(name, exchange=votes)


@each_that_freezes
def test_one_worker_freezes_nothing(name):
    """It has nobody to send signs to: it is Optax's, whatever it is told."""
    case, params, steps = CASES[name], tree_of(0), range(FREEZE + 3)
    options = {"weight_decay": 0.1, "mask": DECAYED}
    run = Workers(made(name, **options, **case.warmup_options), params, mesh_of(1))
    updates = [run.update(tree_of(1 + step, 1), params) for step in steps]
    assert int(onebit_jax.metrics(run.state)["frozen_at"]) == 0
    taken = {s: int(n) for s, n in onebit_jax.steps_by_stage(run.state).items() if n}
    assert taken == {"warmup" if case.warmup else "variance": len(steps)}
    if case.warmup:
        exact = case.warmup(0.1, **options)
        with jax.numpy_dtype_promotion("standard"):
            state, update = exact.init(params), jax.jit(exact.update)
            for step, found in zip(steps, updates, strict=True):
                gradients = jax.tree.map(lambda g: g[0], tree_of(1 + step, 1))
                expected, state = update(gradients, state, params)
                chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["0/1 Adam", "1-bit LAMB", "local Adam"])
def test_it_needs_parameters(name):
    with pytest.raises(ValueError, match="needs the parameters"):
        Workers(made(name), tree_of(0), mesh_of(2)).update(tree_of(1, 2))


@each_case
def test_averaged_gradients_are_refused(name):
    """Though the worker's own means make of them something that differs."""
    tx = optax.chain(onebit_jax.exact_mean("data"), made(name))
    with pytest.raises(ValueError, match=r"is already the same.*local_value_and_grad"):
        Workers(tx, tree_of(0), mesh_of(2)).update(tree_of(1, 2), tree_of(0))


def test_a_number_of_numpys_has_32_bits():
    assert as_float32(np.float64(0.9)).dtype == jnp.float32
    assert type(as_float32(0.9)) is float


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        (onebit_jax.scale_by_onebit_adam, onebit_jax.onebit_adam),
        (onebit_jax.onebit_adamw, onebit_jax.onebit_adam),
        (onebit_jax.zero_one_adam, onebit_jax.onebit_adam),
        (onebit_jax.scale_by_onebit_lamb, onebit_jax.onebit_lamb),
        (onebit_jax.scale_by_binsgdm, onebit_jax.binsgdm),
        (onebit_jax.scale_by_distributed_lion, onebit_jax.distributed_lion),
    ],
)
def test_defaults_of_one_name_are_one(part, whole):
    ours, its = (inspect.signature(f).parameters for f in (whole, part))
    shared = set(ours) & set(its) - {"compressed"}
    assert {k: ours[k] for k in shared} == {k: its[k] for k in shared}
