"""The promises of every exchange, asked of a table of them."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exchanges.cases import CASES, DTYPES, KINDS, SHAPES
from exchanges.errors import errors_of
from virtual_workers import Workers, mesh_over

import onebit_jax

STEPS = 4
DECAY = 0.75  # of a momentum
each_case = pytest.mark.parametrize("name", CASES)
each_kind = pytest.mark.parametrize("name", KINDS)


def each(cases, supports):
    """The cases that support what a test asks."""
    return pytest.mark.parametrize("name", [n for n in cases if supports(CASES[n])])


each_with_errors = each(KINDS, lambda case: case.error_dtype is not None)


def params_of(shapes=SHAPES, dtypes=DTYPES):
    return {k: jnp.zeros(s, dtypes[k]) for k, s in shapes.items()}


@functools.cache
def program(name):
    """The compiled update of a case, and its first state."""
    run = workers_of(CASES[name], CASES[name].make())
    return run, run.state


@functools.cache
def rows_of(name):
    """All cases of the same exchange, on whatever meshes."""
    exchange = CASES[name].make()
    return tuple(row for row, case in CASES.items() if case.make() == exchange)


@functools.cache
def program_on(rows, sizes):
    """The update of the cases on a mesh: that of one of them, if it has this mesh."""
    for row in rows:
        if CASES[row].mesh == dict(sizes):
            return program(row)[0]
    case = dataclasses.replace(CASES[rows[0]], mesh=dict(sizes))
    return workers_of(case, case.make())


def workers_of(case, tx):
    mesh = mesh_over(case.mesh)
    return Workers(tx, params_of(), mesh, axes=case.axes, specs=case.specs)


@functools.cache
def counted(name):
    """The collectives of a case's update, which is compiled once for all tests."""
    return program(name)[0].traffic(values_of(CASES[name].workers, 0)).collectives


def values_of(workers, step, beyond=0.0):
    """All workers' own: magnitudes from leaf to leaf, and zeros of all and of some.

    In the first step a block is zero on all workers, and one on the first of them. All
    are then moved away from zero, zeros up.
    """
    rng, tree = np.random.default_rng(step), {}
    for name, shape in SHAPES.items():
        x = rng.normal(0.3, 1, size=(workers, *shape)) * np.exp(rng.normal())
        x = np.where(rng.random(x.shape) < 0.05, 0, x)
        x = np.where(rng.random(shape) < 0.05, 0, x)
        if step == 0 and name in ("limit", "long"):
            x[slice(None) if name == "limit" else 0, :32] = 0
        x = np.where(x >= 0, x + beyond, x - beyond)
        tree[name] = jnp.asarray(x, DTYPES[name])
    return tree


def flat(x):
    return np.array(x, np.float32).reshape(x.shape[0], math.prod(x.shape[1:]))


@dataclasses.dataclass
class Step:
    """The arguments and results of a step."""

    values: dict
    before: dict
    agreed: dict
    after: dict
    errors: list


def one_step(case, run, step):
    values = values_of(case.workers, step, case.beyond)
    before = errors_of(case, run.state)
    agreed = run.update(values)
    after = errors_of(case, run.state)
    errors = [
        x.value for x in jax.tree.leaves(run.state, is_leaf=is_local) if is_local(x)
    ]
    return Step(values, before, agreed, after, jax.tree.leaves(errors))


def is_local(node):
    return isinstance(node, onebit_jax.WorkerLocal)


@functools.cache
def history(name):
    """Several steps of a case, and the state that they end with."""
    run, run.state = program(name)
    counted(name)
    return [one_step(CASES[name], run, step) for step in range(STEPS)], run.state


def check_step(case, step):
    """Holds a step to the simulation of the errors before it."""
    own = {leaf: flat(step.values[leaf]) for leaf in SHAPES}
    simulated = case.simulate(own, step.before)
    parts = [~expected.undecided for expected in simulated.values()]
    for decided in [np.concatenate(parts)] if case.together else parts:
        assert decided.size == 0 or decided.mean() >= case.decided, "a test of nothing"
    for leaf, expected in simulated.items():
        values = own[leaf]
        decided = ~expected.undecided
        unit = float(jnp.finfo(DTYPES[leaf]).eps)
        largest = np.abs(expected.errors).max(initial=np.abs(values).max(initial=0))
        np.testing.assert_allclose(
            np.asarray(step.agreed[leaf], float).reshape(-1)[decided],
            expected.agreed[decided],
            rtol=unit + 1e-5,
            atol=1e-6 * largest,
            err_msg=leaf,
        )
        for found, errors in zip(step.after[leaf], expected[1:3], strict=True):
            decided = ~np.resize(expected.undecided, errors.shape[-1:])
            check_errors(case, found[..., decided], errors[..., decided], largest)


def check_errors(case, found, expected, largest):
    near = {"rtol": 1e-5, "atol": 1e-6 * largest}
    if case.error_dtype == jnp.bfloat16 and expected.size:
        rounded = np.asarray(jnp.asarray(expected, jnp.bfloat16), float)
        # Of errors that are rounded once no more than few are on another side.
        assert np.mean(found != rounded) <= 0.03, "rounded once, and to even"
        near["rtol"] = 2.0**-7
    np.testing.assert_allclose(found, expected, **near)


@each_case
def test_equals_its_dense_simulation(name):
    for step in history(name)[0]:
        check_step(CASES[name], step)


@each(CASES, lambda case: case.is_mean and case.error_dtype != jnp.bfloat16)
def test_what_was_not_sent_is_the_residual(name):
    """The sum of what is returned is that of the exact means, but for the errors."""
    case, (steps, _) = CASES[name], history(name)
    for leaf in SHAPES:
        unsent, rounding = 0.0, 1e-6
        for step in steps:
            mean = flat(step.values[leaf]).astype(float).mean(axis=0)
            agreed = np.asarray(step.agreed[leaf], float).reshape(-1)
            unsent = unsent + mean - agreed
            largest = np.abs(step.values[leaf]).max(initial=0)
            unit = float(jnp.finfo(DTYPES[leaf]).eps)
            rounding += unit * np.abs(agreed).max(initial=0) + 1e-6 * float(largest)
        errors, server_error = steps[-1].after[leaf]
        residual = errors.mean(axis=0) + server_error
        np.testing.assert_allclose(
            unsent, residual, rtol=0, atol=rounding, err_msg=leaf
        )
        kept = errors.any() and case.error_dtype is not None
        alone = len(errors) == 1
        assert kept or case.is_exact(leaf) or case.simulation is None or alone


class MomentumOf(NamedTuple):
    """Has an exchange's `update` exchange the momentum that parameters stand for."""

    exchange: onebit_jax.Exchange

    def init(self, params):
        return self.exchange.init(params)

    def update(self, updates, state, params):
        return self.exchange.exchange_momentum(updates, params, DECAY, state)


# Those of both ways to exchange it: the codecs', and that of all other exchanges.
QUICK_MOMENTA = ("exact", "sign-2", "count-3", "quantized-2-3", "hierarchical-sign-3x2")
MOMENTA = [
    pytest.param(name, marks=() if name in QUICK_MOMENTA else pytest.mark.slow)
    for name in KINDS
]


@pytest.mark.parametrize("name", MOMENTA)
def test_a_momentum_is_exchanged_as_its_sum(name):
    case, step = CASES[name], history(name)[0][-1]
    run = workers_of(case, MomentumOf(case.make()))
    run.state = history(name)[1]
    before, gradients = step.after, values_of(case.workers, STEPS, case.beyond)
    rng = np.random.default_rng(0)
    momentum = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    agreed = run.update(gradients, momentum)
    assert {x.dtype for x in agreed.values()} == {jnp.dtype(jnp.float32)}
    sums = {
        k: DECAY * momentum[k] + (1 - DECAY) * np.asarray(g, np.float32)
        for k, g in gradients.items()
    }
    check_step(case, Step(sums, before, agreed, errors_of(case, run.state), []))


@each_kind
def test_a_momentum_is_exchanged_in_a_way_that_is_tested(name):
    ways = {type(CASES[x].make()).exchange_momentum for x in QUICK_MOMENTA}
    assert type(CASES[name].make()).exchange_momentum in ways


@each_case
def test_replicas_are_the_same_to_the_bit(name):
    for step in history(name)[0]:
        for leaf, agreed in step.agreed.items():
            copies = {}
            for shard in agreed.addressable_shards:
                copies.setdefault(str(shard.index), set()).add(shard.data.tobytes())
            assert all(len(bits) == 1 for bits in copies.values()), leaf


@each_case
def test_dtypes_stay(name):
    case, (steps, _) = CASES[name], history(name)
    for step in steps:
        assert {k: x.dtype for k, x in step.agreed.items()} == DTYPES
        assert all(x.dtype == case.error_dtype for x in step.errors)


BAD = [
    (name, bad)
    for name, case in CASES.items()
    for bad in (np.nan, -np.inf, 1e30)
    if bad != 1e30 or case.squares
]


@pytest.mark.parametrize(("name", "bad"), BAD)
def test_a_value_that_is_not_finite_spoils_its_block_everywhere(name, bad):
    case, (run, run.state) = CASES[name], program(name)
    leaf, place = "matrix", 6 * 14 - 1
    values = values_of(case.workers, 0)
    spoiled = flat(values[leaf])
    spoiled[-1, place] = bad
    values[leaf] = jnp.asarray(spoiled.reshape(values[leaf].shape))
    agreed = run.update(values)
    expected = {k: np.zeros(math.prod(s), bool) for k, s in SHAPES.items()}
    blocks = case.blocks_of(leaf)
    expected[leaf] = {
        "block": blocks == blocks[place],
        "value": np.arange(blocks.size) == place,
        "nothing": blocks < 0,
    }[case.spoils]
    for k, x in agreed.items():
        wrong = expected[k].reshape(SHAPES[k])
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(
                ~np.isfinite(np.asarray(shard.data, np.float32)), wrong[shard.index], k
            )


# To programs that no other test has, and that a move that stays has the like of.
SLOW_MOVES = [
    ("quantized-4-2", {"data": 8}),
    ("quantized-8-4", {"data": 8}),
    ("per-shard-sign-3", {"data": 4, "model": 2}),
]
MOVES = [
    pytest.param(*move, marks=pytest.mark.slow if move in SLOW_MOVES else ())
    for move in [(name, dict(mesh)) for name in CASES for mesh in CASES[name].resized]
]


@pytest.mark.parametrize(("name", "mesh"), MOVES, ids=str)
def test_another_number_of_workers_keeps_the_residual(name, mesh):
    case, (_, state) = CASES[name], history(name)
    new = dataclasses.replace(case, mesh=mesh)
    old_mesh = mesh_over(case.mesh)
    state = onebit_jax.resize(
        state, case.make(), params_of(), old_mesh, mesh_over(mesh)
    )
    before, after = history(name)[0][-1].after, errors_of(new, state)
    for leaf in SHAPES:
        errors, server_error = before[leaf]
        found = after[leaf][0]
        stay = len(errors) == len(found)
        expected = errors if stay else errors.mean(axis=0)
        expected = np.broadcast_to(expected, found.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(after[leaf][1], server_error)
    run = program_on(rows_of(name), tuple(mesh.items()))
    run.state = state
    check_step(new, one_step(new, run, STEPS))


@each_with_errors
def test_a_state_of_other_options_or_parameters_is_not_resized(name):
    case, (run, state) = CASES[name], program(name)
    other = params_of(SHAPES | {"long": (600,)})
    with pytest.raises(ValueError, match="options, exchange and parameters"):
        onebit_jax.resize(state, case.make(), other, run.mesh, run.mesh)


def traced(name, values, state=None, check_vma=True, local=lambda x: x):
    """Types of an update's results, of workers' values that are changed inside."""
    case = CASES[name]
    tx, mesh = case.make(), mesh_over(case.mesh)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), values)
    state = onebit_jax.abstract_state(tx, params, mesh) if state is None else state
    own, split = onebit_jax.state_specs(state), jax.P(case.axes)
    update = jax.shard_map(
        lambda x, s: tx.update(local(jax.tree.map(lambda x: x[0], x)), s),
        mesh=mesh,
        in_specs=(split, own),
        out_specs=(jax.P(), own),
        axis_names=set(case.axes),
        check_vma=check_vma,
    )
    return jax.eval_shape(update, values, state)


def types_of(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@each_kind
def test_types_need_not_be_checked(name):
    values = values_of(CASES[name].workers, 0)
    agreed, state = traced(name, values, check_vma=False)
    assert types_of(agreed) == types_of(params_of())
    assert types_of(state) == types_of(program(name)[1])


@each_kind
def test_averaged_gradients_are_refused(name):
    axes, values = CASES[name].axes, values_of(CASES[name].workers, 0)

    def averaged(tree):
        return tree | {"long": jax.lax.pmean(tree["long"], axes)}

    with pytest.raises(ValueError, match=r"'long'\] is already the same.*local_value"):
        traced(name, values, local=averaged)


@each_kind
def test_leaves_that_are_no_real_numbers_are_refused(name):
    values = values_of(CASES[name].workers, 0)
    integers = values | {"long": values["long"].astype(jnp.int32)}
    match = r"real floating-point leaves only.*'long'\].*int32"
    with pytest.raises(TypeError, match=match):
        traced(name, integers, state=program(name)[1])
    if CASES[name].error_dtype is not None:
        with pytest.raises(TypeError, match=match):
            traced(name, integers)


@each_with_errors
def test_a_state_of_other_leaves_is_refused(name):
    case, values = CASES[name], values_of(CASES[name].workers, 0)
    longer = jnp.zeros((case.workers, 600))
    with pytest.raises(ValueError, match="make it from the updates' own tree"):
        traced(name, values | {"long": longer}, state=program(name)[1])


@each_with_errors
def test_a_state_of_other_workers_is_refused(name):
    case, values = CASES[name], values_of(CASES[name].workers, 0)
    sizes = case.mesh | {case.axes[0]: 2 * case.mesh[case.axes[0]]}
    automatic = (jax.sharding.AxisType.Auto,) * len(sizes)
    twice = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), automatic)
    state = onebit_jax.abstract_state(case.make(), params_of(), twice)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    message = rf"on the {case.workers} workers of .* with onebit_jax\.resize"
    with pytest.raises(ValueError, match=message):
        traced(name, values, state=state)


@each(KINDS, lambda case: case.specs is None)
@pytest.mark.parametrize("nothing", [{}, {"empty": (0, 3), "none": None}], ids=str)
def test_nothing_to_exchange_is_no_error(name, nothing):
    case = CASES[name]
    values = {k: s and jnp.zeros((case.workers, *s)) for k, s in nothing.items()}
    agreed, _ = traced(name, values)
    assert types_of(agreed) == jax.tree.map(lambda x: (x.shape[1:], x.dtype), values)


@each(KINDS, lambda case: case.specs is None)
def test_is_a_plain_value(name):
    one, other = CASES[name].make(), CASES[name].make()
    assert one == other
    assert hash(one) == hash(other)


def test_a_bucket_is_as_large_in_all():
    sizes = {
        make(axis="data").bucket_size
        for make in (
            onebit_jax.sign_mean,
            onebit_jax.quantized_mean,
            onebit_jax.count_mean,
            onebit_jax.vote_mean,
            onebit_jax.random_vote_mean,
        )
    }
    assert sizes == {2**27}


@each_kind
def test_it_stands_in_optax_chains(name):
    case, (run, _) = CASES[name], program(name)
    chained = optax.chain(optax.identity(), case.make(), optax.scale(2.0))
    state = onebit_jax.abstract_state(chained, params_of(), run.mesh)
    assert types_of(state[1]) == types_of(program(name)[1])
    values = values_of(case.workers, 0)
    own, split = onebit_jax.state_specs(state), jax.P(case.axes)
    update = jax.shard_map(
        lambda x, s: chained.update(jax.tree.map(lambda x: x[0], x), s),
        mesh=run.mesh,
        in_specs=(split, own),
        out_specs=(jax.P(), own),
        axis_names=set(case.axes),
    )
    assert types_of(jax.eval_shape(update, values, state)[0]) == types_of(params_of())


@each_case
def test_counted_bytes_are_those_of_its_trace(name):
    case, (run, _) = CASES[name], program(name)
    # XLA's CPU backend widens bfloat16 in collectives.
    floats = params_of(dtypes=dict.fromkeys(SHAPES, jnp.float32))
    told = onebit_jax.stage_costs(case.make(), floats, run.mesh.shape)["every"]

    def sums(transfers):
        found = {}
        for each in transfers:
            axes = frozenset(axis for axis in each.axes if run.mesh.shape[axis] > 1)
            times = each.times if isinstance(each, onebit_jax.Collective) else 1
            if axes:
                key = each.op, axes
                found[key] = found.get(key, 0) + each.bytes * times
        return found

    assert sums(counted(name)) == sums(told)


@pytest.mark.parametrize(
    "exchange",
    [
        onebit_jax.count_mean("data"),
        onebit_jax.random_vote_mean("data"),
        onebit_jax.vote_mean("data", back="mean"),
    ],
    ids=lambda exchange: type(exchange).__name__,
)
def test_more_workers_than_can_be_counted_are_refused(exchange):
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2**16,), ("data",), automatic)
    update = jax.shard_map(
        lambda x: exchange.update(x[0], exchange.init(x[0]))[0],
        mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"no more than 65535 .*there are 65536"):
        jax.eval_shape(update, jax.ShapeDtypeStruct((2**16, 100), jnp.float32))


def test_a_mean_that_float16_holds_is_found():
    """Where it cannot hold the sum, and where it cannot hold a worker's part."""
    mesh, exchange = mesh_over({"data": 4}), onebit_jax.exact_mean("data")
    run = Workers(exchange, jnp.zeros(40, "f2"), mesh)
    for value in (4e4, np.float16(2.5e-7)):
        each = jnp.full((4, 40), value, "f2")
        np.testing.assert_array_equal(run.update(each), np.asarray(each[0]))
    costs = onebit_jax.stage_costs(exchange, jnp.zeros(40, "f2"), {"data": 4})
    assert costs["every"][0].bytes == run.traffic(each).collectives[0].bytes
