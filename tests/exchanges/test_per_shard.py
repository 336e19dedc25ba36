"""Parameters sharded inside a worker: the same training, only the slow axis crossed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from virtual_workers import mesh_of

import onebit_jax
from models import BertConfig, PreTrainingBatch
from train.bert.objective import init_params, training_loss

MODEL = BertConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    intermediate_size=128,
    max_positions=16,
    dropout=0.0,
)
BLOCK, FREEZE, STEPS = 32, 2, 5


def two_axes(name):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    types = (AxisType.Auto, AxisType.Auto)
    return jax.sharding.Mesh(devices, ("data", name), axis_types=types)


def fully_sharded(params):
    """Halves of the leading dimension: whole blocks of what was one leaf."""
    return jax.tree.map(lambda p: P("fsdp") if p.size > 2 else P(), params)


def tensor_parallel(params):
    """Columns, then rows, of each pair of matrices; the vocabulary by words."""

    def spec(path, p):
        name = jax.tree_util.keystr(path)
        if "qkv" in name or "up" in name:
            return P(*[None] * (p.ndim - 1), "model")
        if "kernel" in name and ("'out'" in name or "down" in name):
            return P("model", None)
        return P("model") if "word" in name or name == "['masked']['bias']" else P()

    return jax.tree_util.tree_map_with_path(spec, params)


LAYOUTS = [fully_sharded, pytest.param(tensor_parallel, marks=pytest.mark.slow)]


def batch():
    rng = np.random.default_rng(0)
    return PreTrainingBatch(
        token_ids=jnp.asarray(rng.integers(0, 64, (8, 16)), jnp.int32),
        token_types=jnp.asarray(rng.integers(0, 2, (8, 16)), jnp.int32),
        lengths=jnp.full(8, 16, jnp.int32),
        masked_positions=jnp.asarray(rng.integers(0, 16, (8, 4)), jnp.int32),
        masked_labels=jnp.asarray(rng.integers(0, 64, (8, 4)), jnp.int32),
        masked_weights=jnp.ones((8, 4), jnp.float32),
        next_sentence_labels=jnp.asarray(rng.integers(0, 2, 8), jnp.int32),
    )


@functools.cache
def trained(layout, kind="signs"):
    """Parameters after each step, losses, and the traffic of the compressed step."""
    params = init_params(MODEL, 0)
    specs, mesh = None, mesh_of(2)
    exchange = onebit_jax.sign_mean("data", block_size=BLOCK)
    if layout is not None:
        specs = layout(params)
        mesh = two_axes("fsdp" if layout is fully_sharded else "model")
        exchange = onebit_jax.per_shard(exchange, specs)
    if kind == "signs":
        tx = onebit_jax.onebit_adam(1e-3, exchange, onebit_jax.freeze_at(FREEZE))
    else:
        tx = optax.chain(onebit_jax.exact_mean("data"), optax.adam(1e-3))
    run = onebit_jax.data_parallel(
        training_loss(MODEL, 0), tx, mesh, axis="data", specs=specs
    )
    with jax.numpy_dtype_promotion("standard"):
        placed, state = run.init(params)
        stages = ("warmup", "compressed") if kind == "signs" else (None,)
        programs = [
            run.step.lower(placed, state, batch(), np.uint32(0), stage=stage).compile()
            for stage in stages
        ]
        traffic = onebit_jax.traffic(programs[-1], mesh)
        shardings = jax.tree.map(lambda x: x.sharding, (placed, state))
        history, losses = [], []
        for step in range(STEPS if kind == "signs" else 0):
            program = programs[step >= FREEZE]
            placed, state, loss = program(placed, state, batch(), np.uint32(step))
            history.append(jax.device_get(placed))
            losses.append(float(loss))
            now = jax.tree.map(lambda x: x.sharding, (placed, state))
            same = jax.tree.map(
                lambda a, b, x: a.is_equivalent_to(b, x.ndim),
                *(shardings, now, (placed, state)),
            )
            assert jax.tree.all(same), "the compiler moved parameters or state"
    return history, losses, traffic


def worst_share(ours, theirs, tolerance):
    """The largest share of a leaf's values that differ by more than a tolerance."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(np.mean(np.abs(a - b) > tolerance) for a, b in pairs)


def test_fully_sharded_trains_as_unsharded():
    flat, flat_losses, _ = trained(None)
    sharded, losses, _ = trained(fully_sharded)
    np.testing.assert_allclose(losses, flat_losses, rtol=1e-3)
    for step, (ours, theirs) in enumerate(zip(sharded, flat, strict=True)):
        # A value within rounding of zero may take the other sign.
        allowed = 0.0 if step < FREEZE else 0.05
        assert worst_share(ours, theirs, 1e-4) <= allowed, step


@pytest.mark.slow
def test_tensor_parallel_trains_as_unsharded():
    flat, flat_losses, _ = trained(None)
    sharded, losses, _ = trained(tensor_parallel)
    # Blocks are of a device's own columns there: other scales after the freeze.
    np.testing.assert_allclose(losses, flat_losses, rtol=2e-2)
    for ours, theirs in zip(sharded[:FREEZE], flat[:FREEZE], strict=True):
        assert worst_share(ours, theirs, 1e-4) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_bits_cross_the_workers_axis(layout):
    size = sum(p.size for p in jax.tree.leaves(init_params(MODEL, 0)))
    leaves = len(jax.tree.leaves(init_params(MODEL, 0)))
    _, _, traffic = trained(layout)
    assert all(c.axes is not None and len(c.axes) == 1 for c in traffic.collectives)
    between = [c for c in traffic.collectives if c.axes == ("data",)]
    floats = [c for c in between if c.dtype != "u32"]
    # Powers: of each leaf, in each step of a 32nd of its rows and columns; the loss,
    # and leaves too small to compress.
    lines = sum(sum(p.shape) for p in jax.tree.leaves(init_params(MODEL, 0)))
    assert sum(c.bytes for c in floats) <= 4 * (leaves + lines / 32 + 1 + 2)
    words = sum(c.sent_bytes for c in between if c.dtype == "u32")
    # Replicated leaves are exchanged by each device, the others once by both.
    assert words <= 1.2 * 2 * size / 8
    assert words >= size / 8 / 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_gathered_inside_a_worker_for_the_exchange(layout):
    name = "fsdp" if layout is fully_sharded else "model"
    _, _, ours = trained(layout)
    _, _, plain = trained(layout, "adam")
    assert not [c for c in ours.collectives if c.axes == (name,) and c.dtype == "u32"]
    # A row or a column that is sharded has its power from all of a worker's devices.
    params = jax.tree.leaves(init_params(MODEL, 0))
    powers = 4 * (4 * len(params) + sum(sum(p.shape) for p in params if p.ndim > 1))
    ours, plain = ours.sent_bytes("compressed", name), plain.sent_bytes(axis=name)
    assert ours <= plain + powers


def test_shards_are_exchanged_as_if_each_were_alone():
    mesh = two_axes("model")
    specs = {"columns": P(None, "model"), "whole": P(), "rows": P("model")}
    shapes = {"columns": (6, 40), "whole": (50,), "rows": (40, 3)}
    rng = np.random.default_rng(0)
    values = {k: rng.normal(size=(2, *s)).astype(np.float32) for k, s in shapes.items()}
    params = {k: jnp.zeros(s) for k, s in shapes.items()}
    exchange = onebit_jax.sign_mean("data", block_size=32)

    def run(tx, mesh, values, params):
        state = onebit_jax.init(tx, params, mesh)
        own = onebit_jax.state_specs(state)

        @jax.jit
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P("data"), own),
            out_specs=(P(), own),
            axis_names={"data"},
        )
        def update(values, state):
            return tx.update(jax.tree.map(lambda x: x[0], values), state)

        for _ in range(2):
            agreed, state = jax.block_until_ready(update(values, state))
        return jax.device_get(agreed)

    whole = run(onebit_jax.per_shard(exchange, specs), mesh, values, params)
    for shard in range(2):
        cut = {
            "columns": (..., slice(20 * shard, 20 * shard + 20)),
            "whole": (...,),
            "rows": (..., slice(20 * shard, 20 * shard + 20), slice(None)),
        }
        alone = run(
            exchange,
            mesh_of(2),
            {k: v[cut[k]] for k, v in values.items()},
            {k: v[cut[k]] for k, v in params.items()},
        )
        for name, expected in alone.items():
            np.testing.assert_array_equal(whole[name][cut[name]], expected)


def test_resizing_keeps_each_shard_its_own():
    params = {"a": jnp.zeros((4, 300)), "b": jnp.zeros(70)}
    specs = {"a": P(None, "model"), "b": P()}
    tx = onebit_jax.per_shard(onebit_jax.sign_mean("data", block_size=32), specs)
    state = onebit_jax.init(tx, params, two_axes("model"))
    filled = jax.tree.map(
        lambda x: jax.device_put(
            np.arange(x.size, dtype=np.float32).reshape(x.shape), x.sharding
        ),
        state,
    )
    devices = np.array(jax.devices()[:6]).reshape(3, 2)
    mesh = jax.sharding.Mesh(
        devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    resized = onebit_jax.resize(filled, tx, params, run.mesh, mesh)
    for old, new in zip(filled.server_error, resized.server_error, strict=True):
        old, new = np.asarray(old.value), np.asarray(new.value)
        for shard in range(old.shape[1]):
            before = old[:, shard].reshape(-1)
            after = new[:, shard].reshape(-1)
            least = min(before.size, after.size)
            np.testing.assert_array_equal(after[:least], before[:least])
    one = jax.sharding.Mesh(devices[:, :1], ("data", "model"))
    with pytest.raises(ValueError, match="keep the other axes"):
        onebit_jax.resize(filled, tx, params, one)


def test_what_cannot_be_sharded_is_refused():
    exchange = onebit_jax.sign_mean("data")
    with pytest.raises(TypeError, match="wire format"):
        onebit_jax.per_shard(onebit_jax.exact_mean("data"), P())
    with pytest.raises(ValueError, match="other axes than the workers'"):
        onebit_jax.per_shard(exchange, {"a": P("data")})
    mesh = two_axes("model")
    tx = onebit_jax.per_shard(exchange, {"a": P("model")})
    with pytest.raises(ValueError, match="divided equally"):
        onebit_jax.init(tx, {"a": jnp.zeros(41)}, mesh)
    tx = onebit_jax.per_shard(exchange, {"a": P("other")})
    with pytest.raises(ValueError, match="no axis 'other'"):
        onebit_jax.init(tx, {"a": jnp.zeros(41)}, mesh)
    for specs in ({"b": P()}, {"a": P(), "b": P()}, {"a": None}):
        tx = onebit_jax.per_shard(exchange, specs)
        with pytest.raises(ValueError, match="a PartitionSpec for each parameter"):
            onebit_jax.init(tx, {"a": jnp.zeros(41)}, mesh)


def square(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def small_run(tx, specs, mesh, **options):
    params = {"w": jnp.ones((64, 128), options.pop("dtype", jnp.float32))}
    run = onebit_jax.data_parallel(
        square, tx, mesh, axis="data", specs=specs, **options
    )
    return run, *run.init(params)


def one_step(run, params, state, **extra):
    x = jax.random.normal(jax.random.key(0), (8, 64)).astype(params["w"].dtype)
    compiled = run.step.lower(params, state, x, **extra).compile()
    return compiled, *jax.block_until_ready(compiled(params, state, x))


def test_specs_of_one_half_alone_are_refused():
    mesh, specs = two_axes("model"), {"w": P(None, "model")}
    plain = onebit_jax.sign_mean("data")
    with pytest.raises(ValueError, match="the same specs"):
        small_run(plain, specs, mesh)
    with pytest.raises(ValueError, match="the same specs"):
        small_run(onebit_jax.per_shard(plain, specs), None, mesh)


def test_explicit_axes_are_refused():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    types = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=types)
    specs = {"w": P(None, "model")}
    with pytest.raises(ValueError, match=r"AxisType\.Auto"):
        small_run(
            onebit_jax.per_shard(onebit_jax.sign_mean("data"), specs), specs, mesh
        )


@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("wire", [onebit_jax.sign_mean, onebit_jax.count_mean])
def test_hyperparameters_in_the_state_reach_each_shard(wire, as_published):
    mesh, specs = two_axes("model"), {"w": P(None, "model")}

    def make(learning_rate, b1):
        exchange = onebit_jax.per_shard(wire("data"), specs)
        return onebit_jax.onebit_adam(
            learning_rate,
            exchange,
            onebit_jax.freeze_at(1),
            b1=b1,
            **(onebit_jax.AS_PUBLISHED if as_published else {}),
        )

    with jax.numpy_dtype_promotion("standard"):
        results = []
        for tx in (
            optax.inject_hyperparams(make)(learning_rate=1e-2, b1=0.9),
            make(1e-2, 0.9),
        ):
            run, params, state = small_run(tx, specs, mesh)
            _, params, state, _ = one_step(run, params, state, stage="compressed")
            results.append(jax.device_get(params["w"]))
    np.testing.assert_allclose(*results, rtol=1e-6)


def test_accumulated_gradients_stay_sharded():
    mesh, specs = two_axes("model"), {"w": P(None, "model")}
    exchange = onebit_jax.per_shard(onebit_jax.sign_mean("data"), specs)
    tx = onebit_jax.onebit_adam(1e-2, exchange, onebit_jax.freeze_at(1))
    tx = onebit_jax.accumulate(tx, 2, "data")
    with jax.numpy_dtype_promotion("standard"):
        run, params, state = small_run(tx, specs, mesh)
        compiled, *_ = one_step(run, params, state, stage="compressed")
    inside = [
        c
        for c in onebit_jax.traffic(compiled, mesh).collectives
        if c.axes == ("model",)
    ]
    # The product's own sums are of a row a sequence.
    assert all(c.bytes < 64 * 128 for c in inside)
    # Only the power of columns is gathered, no gradient and no moment.
    gathered = [c for c in inside if c.op == "all-gather"]
    assert sum(c.bytes for c in gathered) <= 4 * 128


def test_bfloat16_parameters_can_be_sharded():
    mesh, specs = two_axes("model"), {"w": P(None, "model")}
    exchange = onebit_jax.per_shard(onebit_jax.sign_mean("data"), specs)
    tx = onebit_jax.onebit_adam(1e-2, exchange, onebit_jax.freeze_at(1))
    with jax.numpy_dtype_promotion("standard"):
        run, params, state = small_run(tx, specs, mesh, dtype=jnp.bfloat16)
        for stage in ("warmup", "compressed"):
            _, params, state, loss = one_step(run, params, state, stage=stage)
    assert params["w"].dtype == jnp.bfloat16
    assert np.isfinite(float(loss))
