"""State: where it lies, how it is found, and what another number of workers gets."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from virtual_workers import mesh_of

import onebit_jax
from onebit_jax import (
    freeze_at,
    onebit_adam,
    sign_mean,
    skip_nonfinite,
)
from onebit_jax.workers.axes import worker_count

PARAMS = {"w": jnp.zeros((70, 11)), "b": jnp.zeros(11)}


def nested(exchange):
    """An exchange deep inside Optax's own wrappers."""
    inner = optax.inject_hyperparams(onebit_adam)(
        learning_rate=0.1, exchange=exchange, freeze=freeze_at(2)
    )
    return skip_nonfinite(
        optax.chain(optax.identity(), optax.masked(inner, True)), "data"
    )


def test_worker_local_leaves_are_known_anywhere():
    with jax.numpy_dtype_promotion("standard"):
        tx = nested(sign_mean("data"))
        state = onebit_jax.init(tx, PARAMS, mesh_of(4))
    specs = onebit_jax.state_specs(state)
    chex.assert_trees_all_equal_structs(state, specs)
    for (path, leaf), spec in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(specs), strict=True
    ):
        is_error = "_error" in jax.tree_util.keystr(path)
        assert spec == (PartitionSpec("data") if is_error else PartitionSpec()), path
        assert leaf.sharding.is_equivalent_to(
            jax.NamedSharding(mesh_of(4), spec), leaf.ndim
        )
        if is_error:
            assert {s.data.shape[0] for s in leaf.addressable_shards} == {1}


def test_moments_are_found_as_in_adam():
    state = onebit_jax.init(
        onebit_adam(0.1, sign_mean("data"), freeze_at(2)), PARAMS, mesh_of(4)
    )
    for name in ("mu", "nu"):
        chex.assert_trees_all_equal(optax.tree.get(state, name), PARAMS)
    assert int(optax.tree.get(state, "count")) == 0
    assert isinstance(optax.tree.get(state, "worker_error"), onebit_jax.WorkerLocal)


def test_optax_maps_parameter_like_leaves_alone():
    mesh = mesh_of(4)
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(2))
    with jax.set_mesh(mesh):
        kinds = optax.tree_map_params(
            tx,
            lambda leaf: "parameter",
            tx.init(PARAMS),
            transform_non_params=lambda leaf: "other",
        )
    assert jax.tree.leaves(kinds[0].mu) == ["parameter"] * 2
    assert kinds[0].exchange.server_error.value == "other"
    assert kinds[0].count == "other"


@pytest.mark.parametrize(
    "other",
    [
        {"block_size": 1024},
        {"block_size": 64},
        {"block_size": 32, "error_dtype": jnp.bfloat16},
    ],
    ids=str,
)
def test_resizing_with_other_options_is_refused(other):
    """The blocks of the server errors would be given to other parameters."""
    params = {"a": jnp.zeros(40), "b": jnp.zeros(40)}
    state = onebit_jax.init(sign_mean("data", block_size=32), params, mesh_of(8))
    meshes = mesh_of(8), mesh_of(4)
    with pytest.raises(ValueError, match="with the same options, exchange and"):
        onebit_jax.resize(state, sign_mean("data", **other), params, *meshes)
    halves = {"a": jnp.zeros(20), "b": jnp.zeros(60)}
    same = sign_mean("data", block_size=32)
    with pytest.raises(ValueError, match="with the same options, exchange and"):
        onebit_jax.resize(state, same, halves, *meshes)
    with pytest.raises(ValueError, match="the mesh that it was made"):
        onebit_jax.resize(state, same, params, mesh_of(4), mesh_of(4))


def test_moments_whose_dtype_a_step_has_changed_are_resized():
    """Optax's, of bfloat16 parameters with hyperparameters of float32."""
    adam = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(1e-3)
    tx, params = (
        optax.chain(onebit_jax.exact_mean("data"), adam),
        jnp.zeros(4, "bfloat16"),
    )
    meshes = mesh_of(4), mesh_of(2)
    run = onebit_jax.data_parallel(lambda p, x: jnp.mean(x @ p), tx, meshes[0])
    with jax.numpy_dtype_promotion("standard"):
        _, before = run.init(params)
        _, state, _ = run.step(*run.init(params), jnp.ones((4, 4), params.dtype))
    mu = optax.tree.get(state, "mu")
    assert mu.dtype != optax.tree.get(before, "mu").dtype
    resized = onebit_jax.resize(state, tx, params, *meshes)
    np.testing.assert_array_equal(optax.tree.get(resized, "mu"), mu)


def test_a_state_over_two_axes_is_resized():
    def mesh(*shape):
        devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        return jax.sharding.Mesh(devices, ("host", "device"))

    tx = sign_mean(("host", "device"), block_size=32)
    params = jnp.zeros(40)
    state = onebit_jax.init(tx, params, mesh(4, 2))
    error = jnp.arange(512.0).reshape(8, 2, 32)
    worker = dataclasses.replace(state.small_error, value=error)
    resized = onebit_jax.resize(
        state._replace(small_error=worker), tx, params, mesh(4, 2), mesh(1, 2)
    )
    np.testing.assert_allclose(resized.small_error.value, [error.mean(0)] * 2)


def test_what_workers_keep_inside_what_hosts_keep():
    """Each axis is resized by itself, and a parameter's sharding is kept."""

    def mesh(hosts, devices, model=1):
        shape = hosts, devices, model
        devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        return jax.sharding.Mesh(devices, ("host", "device", "model"))

    def keep(value):
        return optax.GradientTransformation(
            lambda params: {
                "own": jax.tree.map(lambda p: jnp.full_like(p, value), params),
                "count": jnp.int32(20_000_001),
                "key": jax.random.key(3),
            },
            lambda updates, state, params=None: (updates, state),
        )

    inside = onebit_jax.per_worker(keep(1.0), "device")
    tx = onebit_jax.per_worker(inside, "host")
    placed = NamedSharding(mesh(2, 2, 2), PartitionSpec(None, "model"))
    params = {"w": jax.device_put(jnp.zeros((3, 4)), placed)}
    state = onebit_jax.init(tx, params, mesh(2, 2, 2))
    found = state.inner.inner["own"]["w"]
    assert (found.axes, found.value.axes) == (("device",), ("host",))
    array = found.value.value
    assert array.shape == (2, 2, 3, 4)  # hosts, devices
    assert array.sharding.spec == PartitionSpec("host", "device", None, "model")
    specs = onebit_jax.state_specs(state).inner.inner["own"]["w"].value.value
    assert specs == PartitionSpec("host", "device")

    numbers = jnp.arange(4.0).reshape(2, 2, 1, 1) + jnp.zeros((2, 2, 3, 4))
    values = jax.tree.map(lambda x: numbers if x.shape[2:] == (3, 4) else x, state)
    shapes = jax.eval_shape(lambda: params)
    resized = onebit_jax.resize(values, tx, shapes, mesh(2, 2, 2), mesh(4, 1, 2))
    new = resized.inner.inner["own"]["w"].value.value
    # Of each host the mean of its devices', and of all hosts the mean of these.
    np.testing.assert_array_equal(new, np.full((4, 1, 3, 4), 1.5))
    count = resized.inner.inner["count"].value.value
    np.testing.assert_array_equal(count, np.full((4, 1), 20_000_001))
    keys = resized.inner.inner["key"].value.value
    key = np.asarray(jax.random.key_data(jax.random.key(3)))
    np.testing.assert_array_equal(jax.random.key_data(keys), np.tile(key, (4, 1, 1)))


def test_a_state_that_is_dropped_becomes_zeros():
    """Whatever it begins with."""

    def init(params):
        _, slices = worker_count(("data",))
        own = jnp.full((slices, *params.shape), 5.0)
        return onebit_jax.WorkerLocal(own, ("data",), "drop")

    tx = optax.GradientTransformation(init, optax.identity().update)
    state = onebit_jax.init(tx, jnp.zeros(3), mesh_of(4))
    resized = onebit_jax.resize(state, tx, jnp.zeros(3), mesh_of(4), mesh_of(2))
    np.testing.assert_array_equal(resized.value, np.zeros((2, 3)))


def test_a_state_with_empty_leaves_is_placed_as_the_abstract_one():
    params = {"e": jnp.zeros((4, 0)), "w": jnp.zeros(3)}
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(1))
    run = onebit_jax.data_parallel(lambda p, x: jnp.mean(x @ p["w"]), tx, mesh_of(2))
    abstract = onebit_jax.abstract_state(tx, params, mesh_of(2))
    params, state = run.init(params)
    compiled = run.step.lower(params, abstract, jnp.ones((2, 3))).compile()
    for _ in range(3):  # both stages; what a step returns fits the next one
        params, state, _ = jax.block_until_ready(
            compiled(params, state, jnp.ones((2, 3)))
        )
    assert state[0].frozen_at == 1
    assert params["e"].shape == (4, 0)
    np.testing.assert_array_less(params["w"], 0)


def test_a_saved_state_is_divided_over_the_devices_that_are_there():
    old_mesh, mesh = jax.sharding.AbstractMesh((8,), ("data",)), mesh_of(4)
    tx, params = onebit_adam(0.1, sign_mean("data"), freeze_at(2)), jnp.zeros((64, 300))
    saved = onebit_jax.abstract_state(tx, params, mesh, saved_on=old_mesh)[0]
    error = saved.exchange.worker_error.value
    assert error.shape == (8, 64, 300)
    assert error.sharding.shard_shape(error.shape) == (8, 16, 300)
    assert saved.mu.sharding.is_fully_replicated
    chex.assert_trees_all_equal_structs(
        saved, onebit_jax.abstract_state(tx, params, mesh)[0]
    )


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("workers", "others"), [(4, 2), (2, 4)])
def test_a_state_of_any_mesh_is_resized(workers, others, axis_type):
    """From where a step left it, and from where a checkpoint is restored to."""
    params = {"w": jnp.ones((64, 16)), "b": jnp.ones(70)}
    tx = onebit_adam(0.1, sign_mean("data", block_size=64), freeze_at(2))
    old_mesh, mesh = mesh_of(workers, axis_type), mesh_of(others, axis_type)
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jax.device_put(
            np.asarray(rng.normal(size=x.shape), x.dtype), x.sharding
        ),
        onebit_jax.init(tx, params, old_mesh),
    )
    on_host = jax.device_get(state)
    saved = onebit_jax.abstract_state(tx, params, mesh, saved_on=old_mesh)
    restored = jax.tree.map(
        lambda x, shape: jax.device_put(x, shape.sharding), on_host, saved
    )
    expected = onebit_jax.resize(on_host, tx, params, old_mesh, mesh)
    for each in (state, restored):
        new = onebit_jax.resize(each, tx, params, old_mesh, mesh)
        chex.assert_trees_all_close(new, expected, rtol=1e-6)
        for x, y in zip(*map(jax.tree.leaves, (new, expected)), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_state_of_another_mesh_than_the_one_that_is_set(axis_type):
    """As a program of two meshes has, and one that resumes on other devices."""
    tx, params = sign_mean("data", exact_below=0), jnp.ones(64)
    old_mesh, mesh = mesh_of(4, axis_type), mesh_of(2, axis_type)
    with jax.set_mesh(mesh):
        state = onebit_jax.init(tx, params, old_mesh)
        saved = onebit_jax.abstract_state(tx, params, mesh, saved_on=old_mesh)
        chex.assert_trees_all_equal_shapes(saved, state)
        state = onebit_jax.resize(state, tx, params, old_mesh, mesh)
        assert {x.sharding.mesh for x in jax.tree.leaves(state)} == {mesh}
        costs = onebit_jax.stage_costs(tx, params, {"data": 8})
    assert costs == onebit_jax.stage_costs(tx, params, {"data": 8})


def compilations(run, params, state, steps=3):
    """The number of times that a compiler runs in some steps."""
    events = []

    def listen(event, _, **options):
        if event.endswith("backend_compile_duration"):
            events.append(options)

    jax.monitoring.register_event_duration_secs_listener(listen)
    batch = np.ones((8, 64), np.float32)
    try:
        for _ in range(steps):
            params, state, loss = run.step(params, state, batch)
            loss.block_until_ready()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(events)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_resumed_run_is_compiled_once(axis_type):
    mesh = mesh_of(4, axis_type)
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(2))
    run = onebit_jax.data_parallel(lambda p, x: jnp.mean(x @ p), tx, mesh)
    params, state = jax.device_get(run.init(jnp.zeros((64, 16))))
    saved = onebit_jax.abstract_state(tx, params, mesh, saved_on=mesh)
    state = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), state, saved)
    params = jax.device_put(params, jax.NamedSharding(mesh, PartitionSpec()))
    assert compilations(run, params, state) == 1


@pytest.mark.parametrize(
    "name", ["JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_who_has_not_joined_the_other_processes_is_told_how(name, monkeypatch):
    def init():
        return onebit_jax.init(sign_mean("data"), jnp.zeros(3), mesh_of(2))

    monkeypatch.setenv(name, "4")
    said = rf"one of 4 \({name}\).* call jax.distributed.initia"
    with pytest.warns(UserWarning, match=said):
        init()
    with monkeypatch.context() as joined:
        joined.setattr(jax, "process_count", lambda: 4)
        init()
    for alone in ("1", "", "four"):
        monkeypatch.setenv(name, alone)
        init()


def test_nnx_optimizers_are_told_that_they_cannot_hold_an_exchange():
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(2))
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"data_parallel.* nnx\.Optimizer"):
        nnx.Optimizer(model, tx, wrt=nnx.Param)
    with jax.set_mesh(mesh_of(2)):
        metadata = {"out_sharding": (None, "data")}
        sharded = nnx.Linear(4, 4, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        for each in (model, sharded):
            with pytest.raises(
                ValueError, match=r"nnx\.Optimizer cannot hold .* split"
            ):
                nnx.Optimizer(each, tx, wrt=nnx.Param)


def test_what_is_no_array_is_refused_by_name():
    """As in a module of Equinox, whose functions are leaves."""
    mesh, tx = mesh_of(1), onebit_jax.sign_mean("data")
    model = {"w": jnp.ones(3), "act": jax.nn.relu}
    for make in (
        lambda: onebit_jax.init(tx, model, mesh),
        lambda: onebit_jax.data_parallel(len, tx, mesh).init(model),
        lambda: onebit_jax.stage_costs(tx, model, mesh.shape),
    ):
        with pytest.raises(TypeError, match=r"leaf \['act'\] is no array"):
            make()


def test_states_without_leaves_have_no_empty_arrays():
    """Orbax saves none; a label of optax.partition may have no parameters."""
    for tx in (
        onebit_adam(0.1, sign_mean("data"), freeze_at(2)),
        onebit_jax.onebit_lamb(0.1, sign_mean("data"), freeze_at(2)),
    ):
        for params in ({}, {"w": jnp.zeros((16, 16))}):
            state = onebit_jax.init(tx, params, mesh_of(1))
            rows = [x for x in jax.tree.leaves(state) if x.ndim == 1]
            assert rows
            assert all(x.size for x in rows)
