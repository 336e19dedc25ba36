"""A step of one's own is run by every worker, and is data_parallel's to the bit."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from virtual_workers import mesh_of, mesh_over

import onebit_jax
from onebit_jax.workers.specs import sharding_of

SPECS = {"up": P("model"), "down": P(None, "model"), "bias": P()}
STEPS, FREEZE = 4, 2


def loss_fn(params, x):
    outputs = jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"][None]
    return jnp.mean((outputs - x) ** 2)


def params_of():
    rng = np.random.default_rng(0)
    shapes = {"up": (32, 64), "down": (64, 32), "bias": (32,)}
    return {k: rng.normal(0, 0.1, s).astype(np.float32) for k, s in shapes.items()}


def batches():
    return np.random.default_rng(1).normal(size=(STEPS, 8, 32)).astype(np.float32)


def optimizer(axis):
    exchange = onebit_jax.sign_mean(axis, block_size=32, exact_below=0)
    return onebit_jax.onebit_adam(1e-2, exchange, onebit_jax.freeze_at(FREEZE))


def own_step(tx, axis):
    value_and_grad = onebit_jax.local_value_and_grad(loss_fn, axis)

    def step(params, state, x, *, stage=None):
        loss, gradients = value_and_grad(params, x)
        updates, state = tx.update(gradients, state, params, stage=stage)
        return optax.apply_updates(params, updates), state, {"loss": loss}

    return step


def placed(mesh):
    return {
        k: jax.device_put(p, sharding_of(mesh, SPECS[k], p.ndim))
        for k, p in params_of().items()
    }


@functools.cache
def by_data_parallel(sharded):
    mesh = mesh_over({"data": 2, **({"model": 2} if sharded else {})})
    run = onebit_jax.data_parallel(loss_fn, optimizer("data"), mesh, axis="data")
    params, state = run.init(placed(mesh) if sharded else params_of())
    losses = []
    for t, x in enumerate(batches()):
        params, state, loss = run.step(params, state, x, stage=stage_at(t))
        losses.append(float(loss))
    return jax.device_get(params), losses


def stage_at(step):
    return "warmup" if step < FREEZE else "compressed"


def assert_same(params, losses, *, sharded=False, rtol=1e-5):
    expected, its_losses = by_data_parallel(sharded)
    np.testing.assert_allclose(losses, its_losses, rtol=rtol)
    for name, p in expected.items():
        np.testing.assert_allclose(params[name], p, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("check_vma", [True, False])
def test_it_is_the_step_of_data_parallel(check_vma):
    mesh, tx = mesh_of(2), optimizer("data")
    step = onebit_jax.worker_step(mesh, check_vma=check_vma)(own_step(tx, "data"))
    params = jax.device_put(params_of(), NamedSharding(mesh, P()))
    state, losses = onebit_jax.init(tx, params, mesh), []
    for t, x in enumerate(batches()):
        given = params
        params, state, told = step(params, state, x, stage=stage_at(t))
        losses.append(float(told["loss"]))
    assert_same(params, losses, rtol=0)
    with pytest.raises(ValueError, match="was donated to an earlier step"):
        step(given, state, x)
    with pytest.raises(ValueError, match="'warmup'"):
        step(params, state, x, stage="warmup")


class TrainState(NamedTuple):
    params: dict
    opt_state: tuple


def test_one_tree_is_carried_and_micro_batches_are_scanned():
    mesh, tx = mesh_of(2), optimizer("data")

    @onebit_jax.worker_step(mesh, "data", carried=1)
    def step(train, x):
        def micro(total, part):
            value_and_grad = onebit_jax.local_value_and_grad(loss_fn, "data")
            loss, gradients = value_and_grad(train.params, part)
            return optax.tree.add(total, gradients), loss

        zeros = jax.lax.pcast(optax.tree.zeros_like(train.params), "data", to="varying")
        total, losses = jax.lax.scan(micro, zeros, x.reshape(2, -1, x.shape[-1]))
        gradients = optax.tree.scale(0.5, total)
        updates, state = tx.update(gradients, train.opt_state, train.params)
        new = TrainState(optax.apply_updates(train.params, updates), state)
        return new, jnp.mean(losses)

    params = jax.device_put(params_of(), NamedSharding(mesh, P()))
    train, losses = TrainState(params, onebit_jax.init(tx, params, mesh)), []
    for x in batches():
        train, loss = step(train, x)
        losses.append(float(loss))
    assert_same(train.params, losses, rtol=2e-3)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_is_sharded_inside_a_worker_stays_so(kind):
    mesh, tx = mesh_over({"data": 2, "model": 2}, kind), optimizer("data")
    step = onebit_jax.worker_step(mesh, "data")(own_step(tx, "data"))
    params = placed(mesh)
    state, losses = onebit_jax.init(tx, params, mesh), []
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    for x in batches():
        x = jax.device_put(x, NamedSharding(mesh, P(("data", "model"))))
        params, state, told = step(params, state, x)
        losses.append(float(told["loss"]))
    assert_same(params, losses, sharded=True, rtol=1e-4)
    # From a file, whole on each device, and on the mesh of the step before.
    _, held = saved = jax.tree.map(np.asarray, (params, state))
    whole = jax.device_put(saved, NamedSharding(mesh, P()))
    before = mesh_over({"model": 4}, kind)
    of_before = {
        k: jax.device_put(p, sharding_of(before, SPECS[k], p.ndim))
        for k, p in saved[0].items()
    }
    for carried in ((params, state), saved, whole, (of_before, held)):
        carried = step(*carried, x)[:2]
        assert jax.tree.map(lambda x: x.sharding, carried) == shardings
    assert step.checked.jitted._cache_size() == 1


def test_a_state_of_other_parameters_or_workers_is_refused_before_it_is_placed():
    mesh, tx = mesh_over({"data": 2, "model": 2}), optimizer("data")
    step = onebit_jax.worker_step(mesh, "data")(own_step(tx, "data"))
    state = onebit_jax.init(tx, params_of(), mesh)
    with pytest.raises(ValueError, match=r"'down'\] is sharded over \('model',\)"):
        step(placed(mesh), state, batches()[0])
    four = onebit_jax.worker_step(mesh_of(4), "data")(own_step(tx, "data"))
    with pytest.raises(ValueError, match="for 2 workers and there are 4"):
        four(params_of(), jax.tree.map(np.asarray, state), batches()[0])


def test_what_cannot_be_is_refused():
    mesh, tx = mesh_of(2), optimizer("data")
    params = jax.device_put(params_of(), NamedSharding(mesh, P()))
    state, x = onebit_jax.init(tx, params, mesh), batches()[0]
    own = onebit_jax.worker_step(mesh, "data")

    @own
    def averaged(params, state, x):
        gradients = jax.grad(loss_fn)(params, x)
        updates, state = tx.update(jax.lax.pmean(gradients, "data"), state, params)
        return optax.apply_updates(params, updates), state

    @own
    def nothing_exchanged(params, state, x):
        gradients = onebit_jax.local_value_and_grad(loss_fn, "data")(params, x)[1]
        return optax.tree.add(params, gradients), state

    @own
    def state_left_out(params, state, x):
        return params, jnp.mean(x)

    for step, error, said in (
        (averaged, ValueError, "is already the same on every worker"),
        (nothing_exchanged, ValueError, "pass through no exchange"),
        (state_left_out, TypeError, "must return its first 2 arguments anew"),
    ):
        with pytest.raises(error, match=said):
            step(params, state, x)
    with pytest.raises(ValueError, match="multiple of the 2 workers"):
        averaged(params, state, x[:3])
    with pytest.raises(ValueError, match="pass the key to the step by name"):
        averaged(params, state, jax.random.key(0))
    with pytest.raises(TypeError, match=r"write @worker_step\(mesh, axis\)"):
        onebit_jax.worker_step(own_step(tx, "data"))
    with pytest.raises(ValueError, match="the mesh has no axis 'dta'"):
        onebit_jax.worker_step(mesh, "dta")


def test_batches_and_axes_that_do_not_fit_are_refused():
    mesh, tx = mesh_over({"data": 2, "model": 2}), optimizer("data")
    params, x = params_of(), batches()[0]
    state, function = onebit_jax.init(tx, params, mesh), own_step(tx, "data")

    @onebit_jax.worker_step(mesh, "data")
    def step(params, state, *batches):
        return params, state

    with pytest.raises(ValueError, match=r"\[0\] has 8 and \[1\] has 2\): .* by name"):
        step(params, state, x, np.zeros(2, np.uint32))
    with pytest.raises(TypeError, match=r"pass the 2 arguments .* by position"):
        step(params, state=state)
    with pytest.raises(TypeError, match=r"a jax.Ref cannot be carried"):
        step(jax.new_ref(jnp.zeros(3)), state, x)
    with pytest.raises(ValueError, match=r"works over \('data',\): name the same axes"):
        onebit_jax.worker_step(mesh)(function)(params, state, x)
    both = optimizer(("data", "model"))
    with pytest.raises(ValueError, match=r"works over \('data', 'model'\): name"):
        step(params, onebit_jax.init(both, params, mesh), x)
    divided = jax.device_put(params, NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"\['bias'\] is sharded .* are the workers"):
        step(divided, state, x)


def test_what_is_learnt_beside_gradients_must_be_averaged():
    mesh, x = mesh_of(2), batches()[0]
    own = onebit_jax.worker_step(mesh, "data", carried=1)

    @own
    def apart(carried, x):
        return {"means": jnp.mean(x, 0)}, carried["means"]

    @own
    def averaged(carried, x):
        means = jax.lax.pmean(jnp.mean(x, 0), "data")
        return {"means": means}, jnp.int32(3), x.shape[0]

    carried = {"means": jnp.zeros(32)}
    with pytest.raises(ValueError, match=r"0\['means'\] differs .* jax.lax.pmean\(x"):
        apart(carried, x)
    carried, count, rows = averaged(carried, x)
    np.testing.assert_allclose(carried["means"], x.mean(0), rtol=1e-5, atol=1e-6)
    assert (count.dtype, int(count), int(rows)) == (jnp.int32, 3, 4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """As a module of Equinox: what is no array is a leaf, too."""

    weights: dict
    activation: Callable
    is_training: bool
    dtype: type
    width: int
    count: int


def test_a_module_keeps_its_functions_and_is_compiled_once():
    mesh, tx = mesh_of(2), optimizer("data")

    @onebit_jax.worker_step(mesh, "data")
    def step(model, state, x):
        assert model.is_training

        def loss_of(weights):
            hidden = model.activation(x @ weights["up"]).reshape(-1, model.width)
            outputs = hidden @ weights["down"] + weights["bias"][None]
            return jnp.mean((outputs - x) ** 2)

        value_and_grad = onebit_jax.local_value_and_grad(loss_of, "data")
        loss, gradients = value_and_grad(model.weights)
        updates, state = tx.update(gradients, state, model.weights)
        weights = optax.apply_updates(model.weights, updates)
        new = dataclasses.replace(model, weights=weights, count=model.count + 1)
        return new, state, loss

    # Arrays of the host and of one device, and a Python number.
    given = {**params_of(), "up": jnp.asarray(params_of()["up"])}
    model, losses = Layer(given, jnp.tanh, True, np.float32, 64, 0), []
    programs = set()
    state = onebit_jax.init(tx, params_of(), mesh)
    for x in batches():
        model, state, loss = step(model, state, x)
        losses.append(float(loss))
        programs.add(step.checked.jitted._cache_size())
    assert_same(model.weights, losses)
    assert (model.activation, model.is_training) == (jnp.tanh, True)
    assert type(model.width) is int
    assert int(model.count) == STEPS
    assert len(programs) == 1
    np.testing.assert_array_equal(given["up"], params_of()["up"], "it is not donated")


def test_what_is_no_array_by_name_is_compiled_in():
    mesh = mesh_of(2)
    tx = optax.chain(onebit_jax.exact_mean("data"), optax.sgd(1.0))

    @onebit_jax.worker_step(mesh, "data")
    def step(params, state, x, *, train, norm, scale, stage=None):
        assert stage is None
        value_and_grad = onebit_jax.local_value_and_grad(
            lambda p, x: jnp.mean(scale["of"] * p * norm(x)), "data"
        )
        loss, gradients = value_and_grad(params, x)
        updates, state = tx.update(gradients, state, params)
        if train:
            params = optax.apply_updates(params, updates)
        return params, state, loss

    params = jnp.float32(1)
    state = onebit_jax.init(tx, params, mesh)
    for train, scale, expected in ((True, 2.0, -1), (True, 3.0, -4), (False, 3.0, -4)):
        params, state, _ = step(
            params,
            state,
            jnp.ones(4),
            train=train,
            norm=jnp.square,
            scale={"of": scale},
        )
        assert params == expected
    # A number is an argument like an array, so that its next value needs no program.
    assert step.checked.jitted._cache_size() == 2
    with pytest.raises(TypeError, match="norm"):
        step(params, state, jnp.ones(4), train=True)


@dataclasses.dataclass
class Settings:
    scale: float = 1.0


def test_counts_of_counts_and_what_stands_in_their_place():
    @onebit_jax.worker_step(mesh_of(2), "data", carried=1)
    def step(tree, x, *, settings=None):
        count = tree["count"]
        new = {"count": count + 1, "epoch": tree["epoch"] + count % 2}
        return {**tree, **new, "p": tree["p"] + jax.lax.psum(jnp.sum(x), "data")}

    x = jnp.ones(2)
    tree = {"count": 0, "epoch": 0, "of": 3, "p": jnp.zeros(2)}
    for _ in range(4):
        (tree,) = step(tree, x)
    assert (int(tree["count"]), int(tree["epoch"]), tree["of"]) == (4, 2, 3)
    # Equal in Python, and other programs.
    for value in (True, 1.0):
        (tree,) = step({**tree, "of": value}, x)
        assert type(tree["of"]) is type(value)
    # A function where the other tree has a count.
    (tree,) = step({"act": jnp.tanh, **tree}, x)
    assert tree["act"] is jnp.tanh
    with pytest.raises(TypeError, match="settings is compiled in and must be hashable"):
        step(tree, x, settings=Settings())
    step(tree, x)
    with pytest.raises(ValueError, match="was donated to an earlier step"):
        step({"ema": tree["p"], **tree}, x)


@pytest.mark.parametrize("model", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("data", [AxisType.Auto, AxisType.Explicit])
def test_axes_of_each_kind_are_compiled_for_once(data, model):
    mesh = mesh_over({"data": 2, "model": 2})
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(data, model))
    params, tx = placed(mesh), optimizer("data")
    state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.worker_step(mesh, "data")(own_step(tx, "data"))
    losses = []
    for x in batches()[:2]:
        params, state, told = step(params, state, x)
        losses.append(told["loss"])
    assert step.checked.jitted._cache_size() == 1
    np.testing.assert_allclose(losses, by_data_parallel(True)[1][:2], rtol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_state_of_inits_own_is_compiled_for_once(kind):
    mesh, tx = mesh_over({"data": 2, "model": 2}, kind), optimizer("data")
    with jax.set_mesh(mesh):
        state = tx.init(params_of())
    step = onebit_jax.worker_step(mesh, "data")(own_step(tx, "data"))
    params, losses = params_of(), []
    for x in batches()[:2]:
        params, state, told = step(params, state, x)
        losses.append(told["loss"])
    assert step.checked.jitted._cache_size() == 1
    np.testing.assert_allclose(losses, by_data_parallel(False)[1][:2], rtol=1e-5)


def test_a_state_that_was_saved_is_gone_on_with(tmp_path):
    """On an explicit mesh, whose loss asks for explicit axes; to the bit."""
    mesh, tx = mesh_over({"data": 2, "model": 2}, AxisType.Explicit), optimizer("data")

    def explicit_loss(params, x):
        return loss_fn(jax.tree.map(lambda p: jax.reshard(p, P()), params), x)

    loss_of = jax.sharding.explicit_axes(
        explicit_loss, axes=("model",), in_sharding=(SPECS, P("model"))
    )

    @onebit_jax.worker_step(mesh, "data")
    def step(params, state, x):
        value_and_grad = onebit_jax.local_value_and_grad(loss_of, "data")
        loss, gradients = value_and_grad(params, x)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def trained(params, state, xs):
        losses = []
        for x in xs:
            x = jax.device_put(x, NamedSharding(mesh, P(("data", "model"))))
            params, state, loss = step(params, state, x)
            losses.append(float(loss))
        return params, state, losses

    params = placed(mesh)
    params, state, first = trained(params, onebit_jax.init(tx, params, mesh), batches())
    assert_same(params, first, sharded=True, rtol=1e-4)
    places = jax.tree.map(lambda x: x.sharding, (params, state))
    np.savez(tmp_path / "saved.npz", *jax.tree.leaves((params, state)))
    whole, _, losses = trained(params, state, batches())
    leaves = np.load(tmp_path / "saved.npz").values()
    restored = jax.tree.unflatten(jax.tree.structure(places), leaves)
    restored = jax.device_put(restored, places)
    again, _, its_losses = trained(*restored, batches())
    assert its_losses == losses
    jax.tree.map(np.testing.assert_array_equal, again, whole)


def test_an_array_at_two_places_is_not_donated_twice():
    """As an average of parameters begins; XLA would end the process."""
    mesh = mesh_of(2, AxisType.Explicit)
    params = jax.device_put(jnp.ones(4), NamedSharding(mesh, P()))
    # Examples whose features came divided over the workers.
    x = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, P(None, "data")))

    @onebit_jax.worker_step(mesh, "data", carried=1)
    def step(carried, x):
        new = carried["params"] + jax.lax.psum(jnp.sum(x), "data")
        return {"params": new, "average": (carried["average"] + new) / 2}

    (carried,) = step({"params": params, "average": params}, x)
    np.testing.assert_array_equal(carried["params"], jnp.full(4, 9.0))
    np.testing.assert_array_equal(carried["average"], jnp.full(4, 5.0))


def test_an_array_that_is_carried_may_stand_beside_too():
    """A frozen copy of the parameters, as of distillation, is no copy at first."""
    mesh, tx = mesh_of(2), optimizer("data")

    @onebit_jax.worker_step(mesh, "data")
    def step(params, state, x, *, anchor):
        def own_loss(p):
            far = optax.tree.sum(jax.tree.map(lambda a, b: (a - b) ** 2, p, anchor))
            return loss_fn(p, x) + far

        loss, gradients = onebit_jax.local_value_and_grad(own_loss, "data")(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.device_put(params_of(), NamedSharding(mesh, P()))
    state, x = onebit_jax.init(tx, params, mesh), batches()[0]
    for _ in range(2):
        params, state, loss = step(params, state, x, anchor=params)
    assert np.isfinite(loss)
    # One leaf is of another device, and the caller keeps it.
    best = jax.device_put(np.ones((64, 32), np.float32), jax.devices()[1])
    params, state, loss = step({**params, "down": best}, state, x, anchor=params)
    assert np.isfinite(loss)
    assert not best.is_deleted()
