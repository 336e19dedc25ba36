"""The promises of every optimizer, asked of a table of them."""

import functools
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers.cases import (
    CASES,
    DECAYED,
    FORMULAS,
    LONGEST,
    SHAPES,
    UNBOUNDED,
    freeze,
    is_local,
    moment_of,
    moments_of,
    replicated_of,
    residuals_of,
)
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax.inspect.traffic import is_of
from onebit_jax.optimizers.parts.moments import as_float32

WORKERS, FREEZE, STEPS, STEPS_OF_FORMULA = 4, 3, 8, LONGEST
DTYPES = {k: jnp.bfloat16 if k == "matrix" else jnp.float32 for k in SHAPES}
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


def tree_of(seed, workers=None, dtypes=DTYPES, scale=1.0, mean=0.1):
    rng, leading = np.random.default_rng(seed), () if workers is None else (workers,)
    return {
        k: jnp.asarray(rng.normal(mean, scale, size=(*leading, *s)), dtypes[k])
        for k, s in SHAPES.items()
    }


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def growing_gradients(step, freeze):
    """Tripled after the freeze, with rows of zeros before or after, and one spike."""
    full = dict.fromkeys(SHAPES, jnp.float32)
    gradients = jax.tree.map(np.array, tree_of(1000 + step, WORKERS, full))
    kernel = gradients["kernel"]
    if step < freeze:
        kernel[:, :3] = 0
        return gradients
    kernel[:, 5, 0] = 1e4 if step == freeze + 9 else 0.0
    kernel[:, 8:10] = 0
    return {k: np.float32(3 * g) for k, g in gradients.items()}


@pytest.mark.parametrize("name", FORMULAS)
def test_is_its_formula(name):
    """In float64 NumPy, with an exact exchange so that no sign is undecided."""
    case, freeze_step, lr, decay = FORMULAS[name], 6, 0.1, 0.1
    moments = {"b1": 0.8, "b2": 0.95, "eps": 1e-3}
    tx = case.make(
        lr, onebit_jax.exact_mean("data"), freeze(freeze_step), **moments,
        weight_decay=decay, mask=DECAYED,
    )  # fmt: skip
    params = tree_of(0, dtypes=dict.fromkeys(SHAPES, jnp.float32))
    run = Workers(tx, params, mesh_of(WORKERS))
    expected = {k: np.asarray(p, float) for k, p in params.items()}
    leaves = {
        k: case.leaf(s, *moments.values(), freeze_step, (i, SHAPES.values()))
        for i, (k, s) in enumerate(SHAPES.items())
    }
    size, bounded = sum(p.size for p in params.values()), []
    for step in range(STEPS_OF_FORMULA):
        gradients = growing_gradients(step, freeze_step)
        updates = run.update(gradients, params)
        params = optax.apply_updates(params, updates)
        for k, leaf in leaves.items():
            update = leaf.update(gradients[k].astype(float))
            update = update + decay * DECAYED[k] * expected[k]
            expected[k] = expected[k] - lr * update
            np.testing.assert_allclose(
                params[k], expected[k], err_msg=f"{k} after step {step + 1}",
                rtol=1e-4, atol=1e-4 * np.abs(expected[k]).max(),
            )  # fmt: skip
        bounded.append(sum(leaf.bounded for leaf in leaves.values()))
        if "bound" in case.parts:
            share = onebit_jax.metrics(run.state)["bounded_share"]
            np.testing.assert_allclose(share, bounded[-1] / size, rtol=1e-6)
    taken = Counter(case.stage(step, freeze_step) for step in range(STEPS_OF_FORMULA))
    steps = onebit_jax.steps_by_stage(run.state)
    assert {stage: int(n) for stage, n in steps.items() if n} == taken
    for moment, (its, _) in case.moments.items():
        for k, leaf in leaves.items():
            x, y = moment_of(run.state, moment)[k], getattr(leaf, its)
            np.testing.assert_allclose(
                x, y, rtol=1e-5, atol=1e-6 * max(np.abs(y).max(), 1e-9)
            )
    # The gradients are such that each part changes something.
    assert (max(bounded) > 0) == ("bound" in case.parts)
    raised = sum(leaf.raised for leaf in leaves.values())
    assert raised == (0 if name in UNBOUNDED else 3 * 17)
    told = onebit_jax.metrics(run.state)["floored_share"]
    np.testing.assert_allclose(told, raised / size, rtol=1e-6)


def schedule(count):
    return 0.01 / (1.0 + jnp.asarray(count, jnp.float32) / 50)


@of_cases(lambda case: case.warmup)
def test_before_the_freeze_it_is_optaxs_on_the_mean(name):
    case = CASES[name]
    options = {"weight_decay": 0.1, "mask": DECAYED, "b1": 0.5}
    full = dict.fromkeys(SHAPES, jnp.float32)
    ours = theirs = tree_of(0, dtypes=full)
    tx = case.make(schedule, onebit_jax.sign_mean("data"), freeze(1000), **options)
    run = Workers(tx, ours, mesh_of(WORKERS), stage="warmup")
    # Optax's own arithmetic mixes integers and floats.
    with jax.numpy_dtype_promotion("standard"):
        exact = case.warmup(schedule, **options)
        state, update = exact.init(theirs), jax.jit(exact.update)
        for step in range(50):
            own = tree_of(step, WORKERS, full)
            if step < 45:  # then it moves by more than three learning rates
                own["scale"] *= 0
            updates = run.update(own, ours)
            ours = optax.apply_updates(ours, updates)
            mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), own)
            updates, state = update(mean, state, theirs)
            theirs = optax.apply_updates(theirs, updates)
    chex.assert_trees_all_close(ours, theirs, rtol=2e-6, atol=2e-6)
    assert int(moments_of(run.state).count) == 50
    for moment, (_, its) in case.moments.items():
        chex.assert_trees_all_close(
            moment_of(run.state, moment), optax.tree.get(state[0], its),
            rtol=1e-5, atol=1e-7,
        )  # fmt: skip


def optimizer(name):
    case = CASES[name]
    tx = case.make(0.1, case.exchange(), freeze(FREEZE), weight_decay=0.01)
    return onebit_jax.skip_nonfinite(tx, "data")


@functools.cache
def program(name, workers=WORKERS, check_vma=True, **extra):
    """A compiled step and its first state."""
    run = Workers(
        optimizer(name), tree_of(0), mesh_of(workers), check_vma=check_vma, **extra
    )
    return run, run.state


@functools.cache
def traffic_of(name, **extra):
    return program(name, **extra)[0].traffic(tree_of(0, WORKERS), tree_of(0))


def trained(name, steps, own=None, params=None, **options):
    """Parameters and state before each step and after the last, of one program."""
    run, first = program(name, **options)
    if params is None:
        params, run.state = tree_of(0), first
    history = [(params, run.state)]
    for step in steps:
        gradients = tree_of(1 + step, WORKERS) if own is None else own(step)
        params = optax.apply_updates(params, run.update(gradients, params))
        history.append((params, run.state))
    return history


@functools.cache
def history(name):
    return trained(name, range(STEPS))


@each_case
def test_resumes_from_numpy_arrays_at_any_step(name):
    run, _ = program(name)
    told = onebit_jax.abstract_state(optimizer(name), tree_of(0), run.mesh)
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
        updates = run.update(tree_of(1 + step, WORKERS), params)
        after = optax.apply_updates(params, updates), run.state
        assert bits(after) == bits(history(name)[step + 1])


@each_case
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e25], ids=str)
@pytest.mark.parametrize("step", [0, FREEZE - 1, FREEZE, STEPS - 1])
def test_a_step_that_is_not_finite_changes_nothing(name, bad, step):
    run, _ = program(name)
    params, run.state = history(name)[step]
    params = params | {"bias": params["bias"].at[7].set(-0.0)}
    own = tree_of(1 + step, WORKERS)
    before = bits((params, run.state.inner))
    spoiled = own | {"kernel": own["kernel"].at[2, 3, 4].set(bad)}
    after = optax.apply_updates(params, run.update(spoiled, params))
    assert bits((after, run.state.inner)) == before
    assert int(onebit_jax.metrics(run.state)["skipped"]) == 1


@each_case
def test_all_workers_hold_the_same_bits(name):
    for params, state in history(name)[1:]:
        for x in jax.tree.leaves((params, replicated_of(state))):
            assert len({shard.data.tobytes() for shard in x.addressable_shards}) == 1


@each_case
def test_moments_of_16_bit_parameters_have_32(name):
    for params, state in history(name):
        assert {k: p.dtype for k, p in params.items()} == DTYPES
        moments = [moment_of(state, moment) for moment in CASES[name].moments]
        assert {x.dtype for x in jax.tree.leaves(moments)} == {np.dtype("f4")}


@of_cases(lambda case: case.stage)
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
            updates = run.update(tree_of(1 + step, WORKERS), params)
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
    told = onebit_jax.stage_costs(optimizer(name), tree_of(0), {"data": WORKERS})
    assert list(told) == (list(onebit_jax.steps_by_stage(run.state)) or ["every"])
    for stage, transfers in told.items():
        found = payloads(c for c in traffic.collectives if is_of(stage, c.stage))
        costs = payloads(transfers)
        # Exact means of 16-bit values are of 32 bits on a CPU.
        exact = costs.pop("all-reduce"), found.pop("all-reduce")
        assert exact[0] <= exact[1] <= exact[0] + 2 * SHAPES["matrix"][0] * 20
        assert costs == found


def same_gradients(workers):
    def own(step):
        one = tree_of(1 + step, 1)
        return jax.tree.map(lambda g: jnp.repeat(g, workers, axis=0), one)

    return own


@functools.cache
def in_unison(name):
    return trained(name, range(STEPS), same_gradients(WORKERS))


@each_case
@pytest.mark.parametrize("step", [FREEZE - 1, STEPS - 2])
def test_other_workers_go_on_as_these(name, step):
    """Where all have the same gradients, their number does not matter."""
    params, state = in_unison(name)[step]
    run, _ = program(name, workers=2)
    run.state = onebit_jax.resize(
        state, optimizer(name), params, mesh_of(WORKERS), run.mesh
    )
    for old, new in zip(residuals_of(state), residuals_of(run.state), strict=True):
        size = min(old.size, new.size)
        old, new = (np.asarray(x, float).reshape(-1) for x in (old, new))
        np.testing.assert_allclose(new[:size], old[:size], rtol=1e-6, atol=1e-7)
        assert not old[size:].any()
        assert not new[size:].any()
    params = jax.device_put(params, jax.NamedSharding(run.mesh, jax.P()))
    params = optax.apply_updates(params, run.update(same_gradients(2)(step), params))
    expected = in_unison(name)[step + 1]
    for x, y in zip(*map(jax.tree.leaves, (params, expected[0])), strict=True):
        if CASES[name].by_chance:
            continue
        np.testing.assert_allclose(
            *(np.asarray(z, float) for z in (x, y)), rtol=0.01, atol=1e-5
        )
    for moment in CASES[name].moments:
        ours, theirs = (moment_of(x, moment) for x in (run.state, expected[1]))
        if is_local(getattr(moments_of(run.state), moment)):
            theirs = jax.tree.map(lambda x: x[:2], theirs)
        chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-6)


@each_case
def test_another_number_of_workers_keeps_the_residual(name):
    """In training, where the workers' errors differ."""
    params, state = history(name)[-1]
    for workers in (1, 3):
        new = onebit_jax.resize(
            state, optimizer(name), params, mesh_of(WORKERS), mesh_of(workers)
        )
        assert sum(bool(jnp.any(x != 0)) for x in residuals_of(state)) >= 3, (
            "no residual"
        )
        for old, x in zip(residuals_of(state), residuals_of(new), strict=True):
            size = min(old.size, x.size)
            old, x = (np.asarray(y, float).reshape(-1) for y in (old, x))
            np.testing.assert_allclose(x[:size], old[:size], rtol=1e-6, atol=1e-7)


@each_case
def test_init_needs_shapes_alone_and_may_be_compiled(name):
    tx, (run, state) = optimizer(name), program(name)
    with jax.set_mesh(run.mesh):
        made = jax.jit(tx.init)(tree_of(0)), tx.init(jax.eval_shape(lambda: tree_of(0)))
    for each in made:
        chex.assert_trees_all_equal(each, state)


@pytest.mark.parametrize("name", CASES | FORMULAS)
def test_no_buffer_is_twice_in_a_new_state(name):
    """Such a state cannot be donated: XLA ends the process."""
    case = (CASES | FORMULAS)[name]
    tx = case.make(0.1, case.exchange(), freeze(FREEZE))
    with jax.set_mesh(mesh_of(1)):
        leaves = [x for x in jax.tree.leaves(tx.init(tree_of(0))) if x.size]
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


@each_case
def test_refuses_a_pair_of_decays(name):
    case, decay = CASES[name], "decay" if name == "BinSGDM" else "b1"
    with pytest.raises(ValueError, match="give a pair of decays as b1 and b2"):
        case.make(1e-3, case.exchange(), freeze(1), **{decay: (0.9, 0.999)})


def test_a_number_of_numpys_has_32_bits():
    assert as_float32(np.float64(0.9)).dtype == jnp.float32
    assert type(as_float32(0.9)) is float
