"""Parameters sharded inside a worker: the same training, only the slow axis crossed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from deepspeed_exchange import DeepSpeedSignMean
from jax.sharding import PartitionSpec as P
from virtual_workers import Workers, mesh_of, mesh_over

import onebit_jax

MESH = {"data": 2, "model": 2}
SHAPES = {"up": (32, 64), "middle": (64,), "down": (64, 32), "bias": (2,)}
# Halves of the leading dimension: whole blocks of what was one leaf.
SPECS = {"up": P("model"), "middle": P("model"), "down": P("model"), "bias": P()}
BLOCK, FREEZE, STEPS = 32, 2, 5
# Bytes of the growth's random sums: of rows and columns, and eight of each vector.
SUMS = 4 * (2 * (32 + 64) + 2 * 8)


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["middle"][None])
    return jnp.mean(jnp.square(hidden @ params["down"] - x)) + params["bias"][0] ** 2


def params_of(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(0, 0.1, s), dtype) for k, s in SHAPES.items()}


def exchange_of(wire=onebit_jax.sign_mean, specs=SPECS):
    return onebit_jax.per_shard(wire("data", block_size=BLOCK), specs)


def onebit(exchange, **options):
    """All steps after the freeze measure the growth."""
    growth = onebit_jax.GrowthByMeanSquares(period=1)
    rule = onebit_jax.freeze_at(FREEZE)
    parts = onebit_jax.Compressed(growth=growth)
    return onebit_jax.onebit_adam(1e-2, exchange, rule, compressed=parts, **options)


def stage_of(step):
    return "warmup" if step < FREEZE else "compressed"


@functools.cache
def trained(kind):
    """Parameters after each step, losses, and the traffic of the last program."""
    specs, mesh = (None, {"data": 2}) if kind == "flat" else (SPECS, MESH)
    tx = {
        "flat": lambda: onebit(onebit_jax.sign_mean("data", block_size=BLOCK)),
        "sharded": lambda: onebit(exchange_of()),
        "adam": lambda: optax.chain(onebit_jax.exact_mean("data"), optax.adam(1e-2)),
    }[kind]()
    mesh = mesh_over(mesh)
    run = onebit_jax.data_parallel(loss_fn, tx, mesh, axis="data", specs=specs)
    rng = np.random.default_rng(1)
    batch = rng.normal(size=(STEPS, 8, 32)).astype(np.float32)
    with jax.numpy_dtype_promotion("standard"):
        params, state = run.init(params_of())
        stages = (None,) if kind == "adam" else ("warmup", "compressed")
        programs = {
            stage: run.step.lower(params, state, batch[0], stage=stage).compile()
            for stage in stages
        }
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    history, losses = [], []
    for step in range(0 if kind == "adam" else STEPS):
        update = programs[stage_of(step)]
        params, state, loss = jax.block_until_ready(update(params, state, batch[step]))
        history.append(jax.device_get(params))
        losses.append(float(loss))
        same = jax.tree.map(
            lambda a, x: a.is_equivalent_to(x.sharding, x.ndim),
            shardings, (params, state),
        )  # fmt: skip
        assert jax.tree.all(same), "the compiler moved parameters or state"
    return history, losses, onebit_jax.traffic(programs[stages[-1]], mesh)


def gathered(traffic):
    """Bytes that are gathered inside a worker for the update."""
    return sum(
        c.bytes
        for c in traffic.collectives
        if (c.op, c.axes) == ("all-gather", ("model",)) and c.stage != "every"
    )


def test_trains_as_unsharded():
    flat, flat_losses, _ = trained("flat")
    sharded, losses, _ = trained("sharded")
    np.testing.assert_allclose(losses, flat_losses, rtol=1e-3)
    for step, (ours, theirs) in enumerate(zip(sharded, flat, strict=True)):
        for name in SHAPES:
            # A value within rounding of zero may take the other sign.
            other = np.mean(np.abs(ours[name] - theirs[name]) > 1e-4)
            assert other <= (0.0 if step < FREEZE else 0.05), (step, name)


def test_only_bits_cross_the_workers_axis():
    size = sum(p.size for p in params_of().values())
    _, _, traffic = trained("sharded")
    assert all(c.axes is not None and len(c.axes) == 1 for c in traffic.collectives)
    between = [c for c in traffic.collectives if c.axes == ("data",)]
    floats = sum(c.bytes for c in between if c.dtype != "u32")
    # The sums, of which a device may take its share; the loss, and the bias.
    assert SUMS / 2 <= floats - 4 * (1 + 2) <= SUMS
    words = sum(c.sent_bytes for c in between if c.dtype == "u32")
    # Two collectives, each of half of the blocks of a device's half of the values; a
    # block is a word of signs and a scale, and the two workers have as many of them.
    blocks = 2 * -(-(size // 2 // BLOCK) // 2)
    assert words == 2 * blocks // 2 * 8


def test_devices_of_a_worker_pass_no_signs_around():
    _, _, traffic = trained("sharded")
    assert {c.op for c in traffic.collectives} == {"all-reduce", "all-gather"}


def test_the_growth_of_heads_sends_their_sums_and_no_gradients():
    """A kernel (features, heads, values) of few heads is no matrix."""
    growth, mesh = onebit_jax.GrowthByMeanSquares(period=1), mesh_over(MESH)
    own, spec = jax.ShapeDtypeStruct((32, 4, 16), jnp.float32), P("data", None, "model")
    follow = jax.shard_map(
        lambda x, state: growth.follow(
            x[0], state, decay=0.9, count=jnp.int32(1), axes=("data",)
        ),
        mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), axis_names={"data"},
    )  # fmt: skip
    x = jax.ShapeDtypeStruct(
        (2, *own.shape), own.dtype, sharding=jax.NamedSharding(mesh, spec)
    )
    found = onebit_jax.traffic(
        jax.jit(follow).lower(x, growth.init(own)).compile(), mesh
    )
    sums = [c.bytes for c in found.collectives if c.axes == ("data",)]
    assert sums == [4 * 8]
    assert sum(c.bytes for c in found.collectives) <= 4 * (8 + 32)


def test_nothing_is_gathered_inside_a_worker_for_the_exchange():
    _, _, ours = trained("sharded")
    _, _, plain = trained("adam")
    assert not [
        c for c in ours.collectives if c.axes == ("model",) and c.dtype == "u32"
    ]
    # Sums of rows are, and those of all; together less than a matrix.
    assert gathered(ours) <= 3 * SUMS < 4 * 32 * 64
    sent = ours.sent_bytes("compressed/measuring", "model")
    assert sent <= plain.sent_bytes(axis="model") + 3 * SUMS


def one_step(tx, dtype=jnp.float32, **extra):
    """The compiled step of each of two stages has run; the last one, and params."""
    mesh = mesh_over(MESH)
    run = onebit_jax.data_parallel(loss_fn, tx, mesh, axis="data", specs=SPECS)
    x = jax.random.normal(jax.random.key(0), (8, 32), dtype)
    with jax.numpy_dtype_promotion("standard"):
        params, state = run.init(params_of(dtype))
        step = run.step.lower(params, state, x, **extra).compile()
        params, state, loss = jax.block_until_ready(step(params, state, x))
    assert np.isfinite(float(loss))
    return onebit_jax.traffic(step, mesh), params


def test_accumulated_gradients_of_16_bits_stay_sharded():
    tx = onebit_jax.accumulate(onebit(exchange_of()), 2, "data")
    found, params = one_step(tx, jnp.bfloat16, stage="compressed")
    assert {x.dtype for x in params.values()} == {jnp.dtype(jnp.bfloat16)}
    # No gradient and no moment.
    assert gathered(found) <= 3 * SUMS < 2 * 32 * 64


def test_hyperparameters_in_the_state_reach_each_shard():
    def make(learning_rate, b1):
        rule = onebit_jax.freeze_at(1)
        return onebit_jax.onebit_adam(
            learning_rate,
            exchange_of(),
            rule,
            b1=b1,
            compressed=onebit_jax.Compressed.published(),
        )

    with jax.numpy_dtype_promotion("standard"):
        injected = optax.inject_hyperparams(make)(learning_rate=1e-2, b1=0.9)
    results = [
        one_step(tx, stage="compressed")[1] for tx in (injected, make(1e-2, 0.9))
    ]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-6, atol=1e-7)


def test_an_exchange_by_shards_of_whole_parameters_is_refused():
    mesh = mesh_over(MESH)
    votes = onebit_jax.per_shard(onebit_jax.random_vote_mean("data"), SPECS)
    for tx in (onebit(exchange_of()), onebit_jax.binsgdm(0.1, votes)):
        run = onebit_jax.data_parallel(loss_fn, tx, mesh, axis="data")
        with pytest.raises(ValueError, match="an exchange does not see"):
            run.init(params_of())


def test_specs_are_enough():
    """An exchange of its own accord works as one that is given them."""
    mesh = mesh_over(MESH)
    states = [
        onebit_jax.data_parallel(
            loss_fn, onebit(exchange), mesh, axis="data", specs=SPECS
        ).init(params_of())[1]
        for exchange in (onebit_jax.sign_mean("data", block_size=BLOCK), exchange_of())
    ]
    shapes = [[(x.shape, x.sharding) for x in jax.tree.leaves(s)] for s in states]
    assert shapes[0] == shapes[1]


def test_resizing_to_other_shards_is_refused():
    state = onebit_jax.init(exchange_of(), params_of(), mesh_over(MESH))
    other = mesh_over({"data": 3, "model": 1})
    with pytest.raises(ValueError, match="keep the other axes"):
        onebit_jax.resize(state, exchange_of(), params_of(), mesh_over(MESH), other)


@pytest.mark.parametrize(
    "exchange", [onebit_jax.sign_mean("data"), DeepSpeedSignMean()]
)
def test_resizing_to_as_many_shards_cut_otherwise_is_refused(exchange):
    tx = onebit_jax.per_shard(exchange, P("a", "b"))
    params = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    old, new = (mesh_over({"data": 2, "a": a, "b": 4 // a}) for a in (1, 2))
    state = onebit_jax.init(tx, jnp.zeros(params.shape), old)
    said = r"over {'a': 1, 'b': 4} .* {'a': 2, 'b': 2}.* begin the state anew, by"
    with pytest.raises(ValueError, match=said):
        onebit_jax.resize(state, tx, params, old, new)
    with pytest.raises(ValueError, match=said):
        onebit_jax.abstract_state(tx, params, new, saved_on=old)


def test_any_exchange_is_given_the_shards():
    tx = onebit_jax.per_shard(DeepSpeedSignMean(), P(None, "model"))
    run = Workers(
        tx, jnp.zeros((3, 20)), mesh_over(MESH), axes=("data",), specs=P(None, "model")
    )
    alone = Workers(DeepSpeedSignMean(), jnp.zeros((3, 10)), mesh_of(2))
    states, expected = [alone.state] * 2, [None] * 2
    for step in range(3):
        x = np.random.default_rng(step).normal(size=(2, 3, 20)).astype(np.float32)
        halves = np.split(x, 2, axis=2)
        for i, half in enumerate(halves):
            alone.state = states[i]
            expected[i], states[i] = alone.update(half), alone.state
        np.testing.assert_allclose(
            run.update(x), np.concatenate(expected, axis=1), rtol=1e-6
        )


def test_what_cannot_be_sharded_is_refused():
    def init(specs):
        onebit_jax.init(exchange_of(specs=specs), {"a": jnp.zeros(41)}, mesh_over(MESH))

    with pytest.raises(TypeError, match="an exchange between workers"):
        onebit_jax.per_shard(optax.identity(), P())
    hosts = onebit_jax.hierarchical(onebit_jax.sign_mean("data"), "device")
    with pytest.raises(TypeError, match="cannot be put inside one another"):
        onebit_jax.init(
            onebit_jax.per_shard(hosts, P()),
            jnp.zeros(41),
            mesh_over(MESH | {"device": 2}),
        )
    with pytest.raises(ValueError, match="other axes than the workers'"):
        exchange_of(specs={"a": P("data")})
    with pytest.raises(ValueError, match="divided equally"):
        init({"a": P("model")})
    with pytest.raises(ValueError, match="no axis 'other'"):
        init({"a": P("other")})
    for specs in ({"b": P()}, {"a": P(), "b": P()}, {"a": None}):
        with pytest.raises(ValueError, match="a PartitionSpec for each parameter"):
            init(specs)


def traced(tx, state_of, values, mesh, axis_names):
    """The types of an exchange's update, with the state of another, traced."""
    state = onebit_jax.abstract_state(state_of, params_of(), mesh)
    update = jax.shard_map(
        lambda x, s: tx.update(x, s)[0],
        mesh=mesh,
        in_specs=(P(), onebit_jax.state_specs(state)),
        out_specs=P(),
        axis_names=axis_names,
        check_vma=False,
    )
    return jax.eval_shape(update, values, state)


def test_what_is_sharded_nowhere_needs_no_further_axis():
    plain = onebit_jax.sign_mean("data", block_size=BLOCK, exact_below=0)
    own = jax.random.normal(jax.random.key(0), (2, 40))
    expected, found = (
        Workers(tx, jnp.zeros(40), mesh_of(2)).update(own)
        for tx in (plain, onebit_jax.per_shard(plain, P()))
    )
    np.testing.assert_array_equal(found, expected)


def test_workers_of_two_axes_stand_before_the_shards():
    exchange = onebit_jax.sign_mean(("host", "device"), exact_below=0)
    mesh = mesh_over({"host": 2, "device": 2, "model": 2})
    tx, params = onebit_jax.per_shard(exchange, P("model")), jnp.zeros(64)
    for x in jax.tree.leaves(onebit_jax.abstract_state(tx, params, mesh)):
        assert x.sharding.spec[:2] == (("host", "device"), "model")


def test_updates_and_axes_that_are_not_the_states_are_refused():
    plain, mesh = onebit_jax.sign_mean("data", block_size=BLOCK), mesh_over(MESH)
    for values in ({"up": jnp.zeros((32, 64))}, params_of() | {"x": jnp.zeros(2)}):
        with pytest.raises(ValueError, match="a PartitionSpec for each parameter"):
            traced(plain, exchange_of(), values, mesh, {"data"})
    with pytest.raises(ValueError, match=r"'model' to be AxisType\.Auto"):
        traced(exchange_of(), exchange_of(), params_of(), mesh, set(MESH))
