"""A step names what it was given wrongly, and passes on what it was given rightly."""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from launching import ROOT
from virtual_workers import mesh_of, mesh_over

import onebit_jax
from onebit_jax import data_parallel, freeze_at, onebit_adam, sign_mean, simulated
from onebit_jax.step.checked import Step

BATCH = jnp.ones((4, 3))


def loss(params, x):
    return jnp.mean((x @ params["w"] - 1) ** 2)


def runs_of(tx=None, loss_fn=loss, **options):
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(2)) if tx is None else tx
    return {
        "devices": data_parallel(loss_fn, tx, mesh_of(2), **options),
        "simulated": simulated(loss_fn, tx, 2, **options),
    }


SGD = optax.chain(onebit_jax.exact_mean("data"), optax.sgd(0.1))
each = pytest.mark.parametrize("how", ["devices", "simulated"])


def test_parameters_that_were_not_placed_are_named():
    """As those of a script are, whose state was restored onto the mesh."""
    run = runs_of()["devices"]
    _, state = run.init({"w": jnp.zeros(3)})
    message = (
        r"params\['w'\] is on 1, state\[0\]\.\S+ is on 2: place parameters by run.init"
    )
    with pytest.raises(ValueError, match=message):
        run.step(jax.device_put({"w": jnp.zeros(3)}, jax.devices()[0]), state, BATCH)


@each
def test_what_was_donated_is_named(how):
    run = runs_of()[how]
    params, state = run.init({"w": jnp.zeros(3)})
    new = run.step(params, state, BATCH)
    with pytest.raises(ValueError, match=r"params\['w'\] was donated .* returned"):
        run.step(params, new[1], BATCH)
    with pytest.raises(ValueError, match=r"state\[0\].count was donated"):
        run.step(new[0], state, BATCH)
    run.step(*new[:2], BATCH)


@each
def test_what_is_carried_may_stand_beside_too(how):
    """As the parameters of a moment ago; XLA ends the process where it is donated."""

    def near(params, x, anchor):
        return loss(params, x) + jnp.sum((params["w"] - anchor["w"]) ** 2)

    run = runs_of(SGD, near)[how]
    params, state = run.init({"w": jnp.zeros(3)})
    once, state, _ = run.step(params, state, BATCH, {"w": np.zeros(3, np.float32)})
    params, state = run.init({"w": jnp.zeros(3)})
    again, state, _ = run.step(params, state, BATCH, params)
    np.testing.assert_array_equal(once["w"], again["w"])
    average = {"w": again["w"], "b": again["w"]}
    run = runs_of(SGD)[how]
    _, state = run.init(average)
    new, state, _ = run.step(average, state, BATCH)
    np.testing.assert_array_equal(new["b"], once["w"])


@jax.tree_util.register_pytree_node_class
class Attributes(dict):
    """As in JAX's cookbook; to ask it for what it lacks is a KeyError."""

    __getattr__ = dict.__getitem__

    def tree_flatten(self):
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, keys, values):
        return cls(zip(keys, values, strict=True))


@each
def test_parameters_may_be_a_dict_of_attributes(how):
    tx = optax.chain(onebit_jax.exact_mean("data"), optax.trace(0.9))
    run = runs_of(tx)[how]
    _, state, _ = run.step(*run.init(Attributes(w=jnp.zeros(3))), BATCH)
    assert isinstance(state[1].trace, Attributes)


@each
@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"w": jnp.zeros(3), "b": jnp.zeros(2)}, r"mu\['b'\] is missing and would be"),
        ({"w": jnp.zeros((3, 1))}, r"mu\['w'\] is \(3,\) and would be \(3, 1\)"),
    ],
)
def test_a_state_of_other_parameters(how, params, said):
    run = runs_of()[how]
    _, state = run.init({"w": jnp.zeros(3)})
    with pytest.raises(ValueError, match=said + r".* run.init\(params\)"):
        run.step(params, state, BATCH)


@each
def test_a_state_of_another_exchange(how):
    """Whose shapes are the same."""
    exchange = sign_mean("data", error_dtype="bfloat16")
    other = runs_of(onebit_adam(0.1, exchange, freeze_at(2)))[how]
    params, state = other.init({"w": jnp.zeros(300)})
    said = r"is bfloat16.*would be float32.*abstract_state\(tx, params, mesh\), or "
    with pytest.raises(ValueError, match=said):
        runs_of()[how].step(params, state, jnp.ones((4, 300)))


@each
def test_a_loss_divided_by_the_mean_of_the_workers_counts(how):
    """Of few or many tokens that are not masked, the gradient is the whole batch's."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    mask = jnp.array([1.0, 1.0, 1.0, 0.0])
    batch = x, mask

    def sum_of(params, batch):
        x, mask = batch
        return jnp.sum(mask * (x @ params["w"] - 1) ** 2)

    def divided(params, batch):
        return sum_of(params, batch) / jax.lax.pmean(jnp.sum(batch[1]), "data")

    run = runs_of(optax.chain(onebit_jax.exact_mean("data"), optax.sgd(1.0)), divided)[
        how
    ]
    start = {"w": jnp.zeros(3)}
    params, _, mean = run.step(*run.init(start), batch)
    whole, gradient = jax.value_and_grad(sum_of)(start, batch)
    np.testing.assert_allclose(params["w"], -gradient["w"] / 3, rtol=1e-6)
    np.testing.assert_allclose(mean, whole / 3, rtol=1e-6)


@each
def test_a_stage_that_needs_what_nothing_has_learnt(how):
    run = runs_of()[how]
    params, state = run.init({"w": jnp.zeros(3)})
    with pytest.raises(ValueError, match="has no stage 'compresed': name one of its"):
        run.step(params, state, BATCH, stage="compresed")
    with pytest.raises(ValueError, match="begin with stage='warmup', or leave"):
        run.step(params, state, BATCH, stage="compressed")
    for stage in ("warmup", "warmup", "compressed"):
        params, state, _ = run.step(params, state, BATCH, stage=stage)
    assert int(onebit_jax.metrics(state)["frozen_at"]) == 2
    with pytest.raises(ValueError, match=r"frozen after 2 steps.* stage='compressed'"):
        run.step(params, state, BATCH, stage="warmup")
    # A step that has run both stages is given a state that is new, made elsewhere.
    params, state = runs_of()[how].init({"w": jnp.zeros(3)})
    with pytest.raises(ValueError, match="begin with stage='warmup', or leave"):
        run.step(params, state, BATCH, stage="compressed")


def test_a_stage_after_a_skipped_step():
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(2))
    run = runs_of(onebit_jax.skip_nonfinite(tx, "data"))["simulated"]
    params, state = run.init({"w": jnp.zeros(3)})
    params, state, _ = run.step(params, state, jnp.nan * BATCH, stage="warmup")
    with pytest.raises(ValueError, match="begin with stage='warmup', or leave"):
        run.step(params, state, BATCH, stage="compressed")


def test_a_state_that_is_traced_cannot_tell_its_stage():
    run = runs_of()["simulated"]
    params, state = run.init({"w": jnp.zeros(3)})
    step = functools.partial(run.step, stage="compressed")
    found = jax.eval_shape(step, params, state, BATCH)
    assert found[0]["w"].shape == (3,)


def test_a_state_is_not_waited_for_in_every_compressed_step(monkeypatch):
    """Its counters are read where a stage begins, and as long as one may end."""
    looks = []
    monkeypatch.setattr(
        "onebit_jax.optimizers.onebit_adam.stage_refusal",
        lambda frozen_at, stage: looks.append(stage),
    )
    run = runs_of()["simulated"]
    params, state = run.init({"w": jnp.zeros(3)})
    for stage in ("warmup", "warmup", *["compressed"] * 3):
        params, state, _ = run.step(params, state, BATCH, stage=stage)
    assert looks == ["warmup", "warmup", "compressed"]


@each
def test_what_the_optimizer_asks_for_by_name(how):
    """The plateau is the caller's to tell: here each value is as bad as the last."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    tx = optax.chain(onebit_adam(0.1, sign_mean("data"), freeze_at(2)), plateau)
    run = runs_of(tx)[how]
    params, state = run.init({"w": jnp.zeros(3)})
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(4):
            params, state, _ = run.step(params, state, BATCH, value=jnp.float32(1))
    assert float(state[1].scale) < 1


@each
def test_auxiliary_values_come_fourth(how):
    def loss_fn(p, x):
        return loss(p, x), {"norm": jnp.sum(p["w"])}

    run = runs_of(SGD, loss_fn, has_aux=True)[how]
    _, _, value, aux = run.step(*run.init({"w": jnp.ones(3)}), BATCH)
    assert (float(value), float(aux["norm"])) == (4.0, 3.0)


@each
@pytest.mark.parametrize(
    ("returned", "has_aux", "said"),
    [
        (lambda x: (x, x), False, r"more than the loss: pass has_aux=True"),
        (lambda x: x, True, r"no pair: return \(loss, aux\).* or leave has_aux=True"),
        (lambda x: (x, x, x), True, r"no pair: return \(loss, aux\)"),
        (lambda x: (x, {"k": jax.random.key(0)}), True, r"\['k'\] is a random key"),
    ],
)
def test_what_a_loss_must_not_return(how, returned, has_aux, said):
    run = runs_of(SGD, lambda p, x: returned(loss(p, x)), has_aux=has_aux)[how]
    with pytest.raises(TypeError, match=said):
        run.step(*run.init({"w": jnp.ones(3)}), BATCH)


@pytest.mark.parametrize("how", ["devices", "simulated", "a step of one's own"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: jax.random.key(0), r"\['m'\] is a random key, which .*fold_in\("),
        (lambda: nnx.Rngs(0), r"\['m'\].default.count is Flax's RngCount, which"),
        (
            lambda: nnx.BatchNorm(3, rngs=nnx.Rngs(0)),
            r"\.mean is Flax's BatchStat, .*has_aux=True",
        ),
        (
            lambda: nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0))),
            r"\['m'\]\['mean'\] is Flax's BatchStat, which must not be trained: leave",
        ),
    ],
)
def test_what_must_not_be_trained(how, make, said):
    """By an optimizer that would train whatever it is given."""
    inits = {name: run.init for name, run in runs_of(SGD).items()}
    inits["a step of one's own"] = lambda p: onebit_jax.init(SGD, p, mesh_of(2))
    with pytest.raises(TypeError, match=said):
        inits[how]({"w": jnp.ones(3), "m": make()})


@each
def test_a_random_key_is_no_part_of_the_batch(how):
    run = runs_of(SGD, lambda p, batch: loss(p, batch[0]))[how]
    match = r"\[1\] is a random key, .* run\.step after the batch"
    with pytest.raises(ValueError, match=match):
        run.step(*run.init({"w": jnp.ones(3)}), (BATCH, jax.random.key(0)))


@each
def test_a_variable_at_two_places_is_not_trained_apart(how):
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    model.tied = model.kernel
    run = runs_of(SGD, lambda model, x: jnp.mean(model(x) ** 2))[how]
    with pytest.raises(ValueError, match=r"\.kernel and \.tied are one variable"):
        run.init(model)
    run.init(nnx.state(model))


@each
def test_an_nnx_model_of_parameters_alone(how):
    run = runs_of(SGD, lambda model, x: jnp.mean(model(x) ** 2))[how]
    params, state = run.init(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    first = run.step(params, state, BATCH)
    assert float(run.step(*first[:2], BATCH)[2]) < float(first[2])


OF_ITS_OWN = """
import jax, numpy as np, onebit_jax, optax
from jax.sharding import NamedSharding, PartitionSpec as P
jax.distributed.initialize()
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
pair = jax.make_mesh((1, 2), ("replica", "data"))
own = jax.process_index()

def whole(x, spec=P(), mesh=mesh):
    place = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(x.shape, place, lambda part: x[part])

def run(rate=0.1):
    tx = optax.chain(onebit_jax.exact_mean("data"), optax.sgd(rate, 0.9))
    return onebit_jax.data_parallel(lambda p, x, *_: (p["w"] * x).sum(), tx, mesh)

def step(change, *args, rate=0.1, **options):
    params, state = run(rate).init({"w": np.zeros(3, np.float32)})
    batch = whole(np.ones((2, 3), np.float32), P("data"))
    run(rate).step(*change(params, state), batch, *args, **options)

of_seed = {"w": np.full(3, own, np.float32)}
of_dtype = {"w": np.zeros(3, "float16" if own else "float32")}
cases = {
    "nothing": lambda: step(lambda p, s: (p, s), jax.random.key(7), stage=None),
    "parts": lambda: onebit_jax.init(
        onebit_jax.exact_mean("replica"),
        whole(np.arange(4.0, dtype="f"), P("data"), pair), pair),
    "nan": lambda: run().init({"w": np.full(3, np.nan, np.float32)}),
    "rate": lambda: step(lambda p, s: (p, s), rate=0.1 + own),
    "host": lambda: run().init(of_seed),
    "global": lambda: onebit_jax.init(
        onebit_jax.exact_mean("data"), {"w": whole(of_seed["w"])}, mesh),
    "dtype": lambda: run().init(of_dtype),
    "more": lambda: run().init({"w": of_dtype["w"]} if own else {}),
    "params": lambda: step(lambda p, s: ({"w": whole(of_seed["w"])}, s)),
    "state": lambda: step(
        lambda p, s: (p, jax.tree.map(lambda x: whole(np.float32(x) + own), s))),
    "key": lambda: step(lambda p, s: (p, s), jax.random.key(own)),
    "value": lambda: step(lambda p, s: (p, s), value=np.float32(own)),
}
for name, case in cases.items():
    try:
        case()
        print("of its own:", name, "passed")
    except ValueError as error:
        print("of its own:", name, error)
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """Sentences of two processes that differ in one thing at a time."""
    script = tmp_path_factory.mktemp("processes") / "script.py"
    script.write_text(OF_ITS_OWN)
    launcher = [sys.executable, "-m", "onebit_launch", "--processes", "2", "--", script]
    launched = subprocess.run(
        launcher, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert launched.returncode == 0, launched.stderr
    said = re.findall(r"(?m)^\[\d\] of its own: (\w+) (.*)$", launched.stdout)
    # Both processes say the same.
    assert len(said) == 2 * len(set(said)), launched.stdout
    return dict(said)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nothing", "passed"),
        ("parts", "passed"),
        ("nan", "passed"),
        ("rate", "process 1 would run another step than process 0: give all"),
        ("host", r"params\['w'\] has other values in process 1 than in process 0: m"),
        ("global", r"params\['w'\] has other values in process 1 than in process 0:"),
        ("dtype", r"params\['w'\] is float16\[3\] in process 1 and float32\[3\] in"),
        ("more", r"params\['w'\] is float16\[3\] in process 1 and missing in proc"),
        ("params", r"params\['w'\] has other values in process 1 .* same seed and"),
        ("state", r"state\[1\]\[0\].trace\['w'\] has other values in process 1"),
        ("key", r"args\[0\] has other values in process 1 than in process 0"),
        ("value", "value has other values in process 1 than in process 0"),
    ],
)
def test_processes_with_something_of_their_own_are_refused(refusals, what, said):
    assert re.match(said, refusals[what])


def test_a_batch_of_one_of_several_processes():
    """`test_examples` trains in two; here the mesh is only said to be of two."""
    step = Step(lambda p, s, x, stage=None: (p, s, x), processes=2)
    params, state = jnp.zeros(3), jnp.zeros(3)
    for batch in (np.ones(4), jnp.ones(4)):
        with pytest.raises(ValueError, match=r"^batch\['x'\] is this process's own"):
            step(params, state, {"x": batch})
    step(params, state, 1.0)


def test_collectives_beside_each_other_are_not_mistaken_for_one_another():
    """XLA ends the process where they do not wait for each other."""
    mesh = mesh_over({"host": 2, "device": 4})
    exchange = onebit_jax.hierarchical(sign_mean("host"), within="device")
    params = {
        "w1": jax.random.normal(jax.random.key(0), (64, 256)) / 8,
        "b1": jnp.zeros((1, 256)),
        "w2": jax.random.normal(jax.random.key(1), (256, 8)) / 16,
        "b2": jnp.zeros((1, 8)),
    }

    def of_two_layers(p, x):
        hidden = jnp.tanh(x @ p["w1"] + p["b1"])
        return jnp.mean((hidden @ p["w2"] + p["b2"] - jnp.sin(x[:, :8])) ** 2)

    run = data_parallel(of_two_layers, onebit_adam(3e-3, exchange, freeze_at(2)), mesh)
    params, state = run.init(params)
    for step in range(24):
        batch = jax.random.normal(jax.random.key(step), (48, 64))
        params, state, _ = jax.block_until_ready(run.step(params, state, batch))
    assert int(onebit_jax.steps_by_stage(state)["compressed/measuring"]) == 3
    onebit_jax.assert_replicas_identical(params, mesh)


@each
def test_a_batch_whose_leaves_are_not_of_the_same_examples(how):
    run = runs_of(SGD, lambda p, batch: loss(p, batch["x"]))[how]
    given = run.init({"w": jnp.ones(3)})
    said = r"\['weights'\] has 2 and \['x'\] has 4\): pass .* after the batch"
    with pytest.raises(ValueError, match=said):
        run.step(*given, {"x": BATCH, "weights": jnp.ones(2)})
    with pytest.raises(ValueError, match="no examples"):
        run.step(*given, {"x": BATCH[:0]})
