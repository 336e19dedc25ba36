"""Parameters that come sharded stay so, with moments and errors, on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers.cases import relaxed
from virtual_workers import mesh_over

import onebit_jax

SIZES = {"replica": 2, "data": 2}
SPECS = {"up": P("data", None), "down": P(None, "data"), "bias": P()}
FREEZE, STEPS = 2, 4


def loss_fn(params, x):
    gathered = params
    if "data" in jax.sharding.get_abstract_mesh().explicit_axes:
        gathered = jax.tree.map(lambda p: jax.reshard(p, P()), params)
    hidden = jnp.tanh(x @ gathered["up"])
    return jnp.mean((hidden @ gathered["down"] - x + gathered["bias"][None]) ** 2)


def params_on(mesh, specs):
    rng = np.random.default_rng(0)
    shapes = {"up": (32, 64), "down": (64, 32), "bias": (32,)}
    return {
        k: jax.device_put(
            rng.normal(0, 0.1, s).astype(np.float32), NamedSharding(mesh, specs[k])
        )
        for k, s in shapes.items()
    }


def optimizer(axis="replica"):
    exchange = onebit_jax.sign_mean(axis, block_size=32, exact_below=0)
    return onebit_jax.onebit_adam(1e-2, exchange, onebit_jax.freeze_at(FREEZE))


@functools.cache
def trained(kind):
    """Losses, and the last step's parameters, state and traffic."""
    mesh = mesh_over(SIZES, AxisType.Auto if kind is None else kind)
    specs = dict.fromkeys(SPECS, P()) if kind is None else SPECS
    run = onebit_jax.data_parallel(loss_fn, optimizer(), mesh, axis="replica")
    params, state = run.init(params_on(mesh, specs))
    batch = np.random.default_rng(1).normal(size=(STEPS, 8, 32)).astype(np.float32)
    rows = NamedSharding(mesh, P(("replica", "data"), None))
    losses = []
    for step in range(STEPS):
        x = jax.device_put(batch[step], rows)
        stage = "warmup" if step < FREEZE else "compressed"
        lowered = run.step.lower(params, state, x, stage=stage)
        params, state, loss = run.step(params, state, x, stage=stage)
        losses.append(float(loss))
    return losses, params, state, onebit_jax.traffic(lowered.compile(), mesh)


@functools.cache
def adam_traffic(kind):
    """Bytes inside one worker of plain `jax.jit` and Adam, whose rows are its share."""
    mesh = mesh_over({"data": 2}, kind)
    params = params_on(mesh, SPECS)
    x = jax.device_put(np.zeros((4, 32), np.float32), NamedSharding(mesh, P("data")))
    adam = relaxed(optax.adam(1e-2))

    def step(params, state, x):
        loss, gradients = jax.value_and_grad(loss_fn)(params, x)
        updates, state = adam.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    with jax.set_mesh(mesh):
        carried = params, adam.init(params)
        placed = jax.tree.map(lambda p: p.sharding, carried)
        compiled = jax.jit(step, out_shardings=(*placed, None)).lower(*carried, x)
    return onebit_jax.traffic(compiled.compile(), mesh).sent_bytes()


kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


@kinds
def test_it_trains_as_unsharded(kind):
    np.testing.assert_allclose(trained(kind)[0], trained(None)[0], rtol=1e-3)


@kinds
def test_parameters_moments_and_errors_stay_sharded(kind):
    _, params, state, _ = trained(kind)
    for tree in (params, state[0].mu, state[0].nu):
        for name, spec in SPECS.items():
            placed = NamedSharding(tree[name].sharding.mesh, spec)
            assert tree[name].sharding.is_equivalent_to(placed, tree[name].ndim), name
    errors = [x for x in jax.tree.leaves(state[0].exchange) if x.size > 64]
    assert errors
    assert {x.addressable_shards[0].data.size for x in errors} <= {
        x.size // n for x in errors for n in (2, 4)
    }


@kinds
def test_nothing_in_full_precision_moves_for_the_update(kind):
    _, _, _, traffic = trained(kind)
    assert traffic.sent_bytes("compressed", "data") == adam_traffic(kind)
    # Growth sums rows and columns, and no matrix of 4 * 32 * 64.
    measuring = traffic.sent_bytes("compressed/measuring", "data")
    assert 0 < measuring - adam_traffic(kind) < 4 * 32 * 64 / 2
    between = [c for c in traffic.collectives if c.axes == ("replica",)]
    assert sum(c.bytes for c in between if c.dtype != "u32") < 4 * 32 * 64 / 2


@pytest.mark.parametrize("make", [onebit_jax.onebit_lamb, onebit_jax.zero_one_adam])
def test_what_a_trace_says_is_sent_until_the_freeze(make):
    mesh = mesh_over(SIZES)
    tx = make(1e-2, onebit_jax.sign_mean("replica"), onebit_jax.freeze_at(FREEZE))
    run = onebit_jax.data_parallel(loss_fn, tx, mesh, axis="replica")
    params, state = run.init(params_on(mesh, SPECS))
    stage, cost = next(iter(onebit_jax.stage_costs(tx, params, mesh.shape).items()))
    x = jax.device_put(
        np.zeros((8, 32), np.float32), NamedSharding(mesh, P(("replica", "data")))
    )
    compiled = run.step.lower(params, state, x, stage=stage).compile()
    sent = onebit_jax.traffic(compiled, mesh).sent_bytes(stage, "replica")
    of_the_loss = 4
    assert sent == onebit_jax.sent_bytes(cost, mesh.shape) + of_the_loss


def test_what_cannot_be_kept_is_refused():
    mesh = mesh_over(SIZES)
    params = params_on(mesh, SPECS)

    def init(tx, axis="replica", params=params):
        onebit_jax.data_parallel(loss_fn, tx, mesh, axis=axis).init(params)

    with pytest.raises(ValueError, match=r"\['down'\] is sharded over \('data',\)"):
        init(optimizer(("replica", "data")), None)
    with pytest.raises(ValueError, match="the optimizer needs an exchange"):
        init(optax.adam(1e-3))
    other = {k: params_on(mesh_over({"fsdp": 2}), dict.fromkeys(SPECS, P("fsdp")))[k]
             for k in SPECS}  # fmt: skip
    with pytest.raises(ValueError, match="not over axes of this mesh"):
        init(optimizer(), params=other)


def test_a_per_shard_of_other_specs_is_refused():
    mesh = mesh_over(SIZES)
    specs = {**SPECS, "up": P(None, "data")}
    exchange = onebit_jax.per_shard(onebit_jax.sign_mean("replica"), specs)
    tx = optax.chain(exchange, optax.sgd(0.1))
    run = onebit_jax.data_parallel(loss_fn, tx, mesh, axis="replica")
    with pytest.raises(ValueError, match="by which the parameters are sharded"):
        run.init(params_on(mesh, SPECS))


@kinds
def test_local_steps_of_sharded_parameters_keep_them_sharded(kind):
    mesh, losses = mesh_over(SIZES, kind), []
    tx = onebit_jax.local_steps(
        optax.sgd(0.1, 0.9), onebit_jax.exact_mean("replica"), onebit_jax.every(2)
    )
    for specs in (SPECS, dict.fromkeys(SPECS, P())):
        run = onebit_jax.data_parallel(loss_fn, tx, mesh, axis="replica")
        params, state = run.init(params_on(mesh, specs))
        for step in range(3):
            x = np.random.default_rng(step).normal(size=(8, 32)).astype(np.float32)
            params, state, loss = run.step(params, state, x)
        losses.append(np.asarray(loss))
        placed = NamedSharding(params["up"].sharding.mesh, specs["up"])
        assert params["up"].sharding.is_equivalent_to(placed, 2)
        # Moments and distances, each worker's own.
        moved = [x for x in jax.tree.leaves(state) if x.shape == (2, 32, 64)]
        assert moved
        rows = 32 // (2 if specs is SPECS else 1)
        assert {x.addressable_shards[0].data.shape for x in moved} == {(1, rows, 64)}
    np.testing.assert_allclose(*losses, rtol=1e-5)


BOTH = {"up": P("data", "model"), "down": P("model", "data"), "bias": P("model")}


def placed_on(mesh, trees, specs):
    return {
        k: jax.device_put(np.asarray(x), NamedSharding(mesh, specs[k]))
        for k, x in trees.items()
    }


@kinds
def test_sharded_over_two_axes_it_goes_on_with_fewer_replicas(kind):
    """From host arrays, as a checkpoint restores them, and where they were."""
    sizes, tx = {"replica": 2, "data": 2, "model": 2}, optimizer()
    meshes = [mesh_over({**sizes, "replica": n}, kind) for n in (2, 1)]
    runs = [onebit_jax.data_parallel(loss_fn, tx, m, axis="replica") for m in meshes]
    params, state = runs[0].init(params_on(meshes[0], BOTH))
    x = np.random.default_rng(1).normal(size=(8, 32)).astype(np.float32)
    losses = []
    for _ in range(FREEZE + 2):
        params, state, loss = runs[0].step(params, state, x)
        losses.append(float(loss))
    compiled = runs[0].step.lower(params, state, x).compile()
    moved = onebit_jax.traffic(compiled, meshes[0]).collectives
    update = [c for c in moved if c.stage != "every" and c.axes != ("replica",)]
    assert max(c.bytes for c in update) < 4 * 32 * 64 / 2

    params = placed_on(meshes[1], params, BOTH)
    like = onebit_jax.abstract_state(tx, params, meshes[1], saved_on=meshes[0])
    state = jax.tree.map(
        lambda saved, at: jax.device_put(np.asarray(saved), at.sharding), state, like
    )
    state = onebit_jax.resize(state, tx, params, *meshes)
    for _ in range(2):
        params, state, loss = runs[1].step(params, state, x)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True), losses
    for tree in (params, state[0].mu, state[0].nu):
        for name, spec in BOTH.items():
            placed = NamedSharding(tree[name].sharding.mesh, spec)
            assert tree[name].sharding.is_equivalent_to(placed, tree[name].ndim), name
