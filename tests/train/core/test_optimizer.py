"""The optimizers of the command line, and their learning rate."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from models import SIZES
from train.bert.objective import abstract_params
from train.core.errors import InputError
from train.core.flags import TrainingFlags
from train.core.mesh import make_mesh
from train.core.optimizer import (
    OPTIMIZERS,
    Plan,
    check_plan,
    decays,
    guarded,
    learning_rate_schedule,
    make_optimizer,
    matrices,
    warmup_and_freeze,
)
from train.core.task import planned_phase


def test_the_freeze_follows_the_warm_up_and_the_steps_by_default():
    assert warmup_and_freeze(300, None, None, 0.2) == (30, 60)
    assert warmup_and_freeze(200, None, None, 0.25) == (20, 50)
    assert warmup_and_freeze(300, 100, None, 0.2) == (100, 100)
    assert warmup_and_freeze(300, 100, 7, 0.2) == (100, 7)
    assert warmup_and_freeze(300, 0, "auto", 0.2) == (0, "auto")
    assert warmup_and_freeze(1, None, None, 0.2) == (0, 1)


@pytest.mark.parametrize("prefix", ["--", "--long-"])
def test_a_learning_rate_that_rises_to_the_end_is_refused_by_its_flag(prefix):
    plan = Plan(
        steps=50, batch=8, learning_rate=1e-3, warmup=50, freeze=50, prefix=prefix
    )
    with pytest.raises(
        InputError, match=f"^{prefix}warmup-steps 50 leaves none of the"
    ):
        check_plan(plan)
    check_plan(replace(plan, warmup=49))
    check_plan(replace(plan, steps=1, warmup=0))


NO_DATA = {"loss": None, "batches": None}


def test_a_freeze_that_comes_too_late_is_told_at_once(capsys):
    plan = Plan(
        steps=8,
        batch=8,
        earlier_steps=1,
        learning_rate=1e-3,
        warmup=1,
        freeze=8,
        prefix="--long-",
    )
    late = (
        "--long-freeze-step is 8 and the phase has 8 steps; start a run with a smaller "
        "one, or with more steps"
    )
    auto = replace(plan, freeze="auto")
    stable = "the variance was not stable; give a new run more steps, or a number as "
    told = f"no step will come after the freeze: {late}.\n"
    for name, planned, last, advice, said in (
        ("onebit_adam", plan, 9, late, told),
        ("onebit_adam", plan, 10, "", ""),
        ("onebit_adam", auto, 9, f"{stable}--long-freeze-step", ""),
        ("adam", auto, 9, "", ""),
    ):
        flags = TrainingFlags(optimizer=name)
        phase = planned_phase(flags, planned, last, make_mesh(1), **NO_DATA)
        assert phase.advice == advice
        assert capsys.readouterr().out == said


def test_an_exponential_fall_follows_the_warm_up():
    schedule = learning_rate_schedule(
        4e-4, 12_500, 152_000, decay_rate=0.99, decay_every=520
    )
    steps = np.array([0, 12_499, 12_500, 12_500 + 520, 12_500 + 52_000, 200_000])
    expected = 4e-4 * np.where(
        steps < 12_500, (steps + 1) / 12_500, 0.99 ** ((steps - 12_500) / 520)
    )
    np.testing.assert_allclose([schedule(s) for s in steps], expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "flags", "exchange"),
    [
        ("onebit_adam", {"exchange": "count_mean"}, onebit_jax.count_mean),
        ("onebit_adam", {"warmup_bits": 4}, onebit_jax.sign_mean),
        ("onebit_adam", {"warmup_bits": 32}, onebit_jax.sign_mean),
        ("binsgdm", {}, onebit_jax.random_vote_mean),
        ("distributed_lion", {}, onebit_jax.vote_mean),
    ],
)
def test_an_optimizer_has_the_exchange_of_the_flag_or_its_own(
    name, flags, exchange, monkeypatch
):
    seen = []

    def make(schedule, exchange, *rule, weight_decay, mask, **warmup):
        assert len(rule) == ("freeze_step" in OPTIMIZERS[name].flags)
        seen.append((exchange, warmup.get("warmup_exchange")))
        return optax.identity()

    monkeypatch.setitem(OPTIMIZERS, name, OPTIMIZERS[name]._replace(make=make))
    config = TrainingFlags(optimizer=name, **flags)
    plan = Plan(steps=9, batch=8, learning_rate=1e-3, warmup=1, freeze=2)
    for topology in ("flat", "hierarchical"):
        planned_phase(config, plan, 9, make_mesh(4, topology), **NO_DATA)
    bits = flags.get("warmup_bits", 8) if name == "onebit_adam" else 32
    by_bits = functools.partial(onebit_jax.quantized_mean, bits=bits)
    expected = (exchange, None if bits == 32 else by_bits)
    assert seen == [
        tuple(each and each("data") for each in expected),
        tuple(
            each and onebit_jax.hierarchical(each("host"), "device")
            for each in expected
        ),
    ]


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_of_a_workers_own_waits_for_nobody(clip):
    mesh = make_mesh(2)
    tx = make_optimizer(
        "zero_one_adam",
        optax.constant_schedule(1e-3),
        onebit_jax.freeze_at(1),
        onebit_jax.sign_mean("data"),
        weight_decay=0.01,
        clip=clip,
    )

    def loss_fn(params, batch):
        return jnp.mean(jnp.square(batch @ params["layer"]["kernel"]))

    run = onebit_jax.data_parallel(loss_fn, tx, mesh)
    params, state = run.init({"layer": {"kernel": jnp.ones((64, 8))}})
    batch = jax.ShapeDtypeStruct((4, 64), jnp.float32)

    def collectives(stage):
        compiled = run.step.lower(params, state, batch, stage=stage).compile()
        return onebit_jax.traffic(compiled, mesh).collectives

    assert collectives("local") == ()
    assert collectives("compressed") != ()


@pytest.mark.parametrize(("clip", "length"), [(0.0, 5.0), (1.0, 1.0)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_worker_whose_gradients_are_not_finite_gives_zeros(clip, length, bad):
    mean = optax.chain(onebit_jax.exact_mean("data"), optax.sgd(1.0))
    run = onebit_jax.data_parallel(
        lambda params, batch: jnp.sum(params * batch[0]),
        guarded(mean, clip, "data", own_steps=True),
        make_mesh(2),
    )
    batch = np.array([[3.0, 4.0], [1.0, bad]], np.float32)
    params, *_ = run.step(*run.init(jnp.zeros(2)), batch)
    np.testing.assert_allclose(params, -length * np.array([0.6, 0.8]) / 2, rtol=1e-6)


def test_biases_and_norms_do_not_decay():
    mask = decays(abstract_params(SIZES["tiny"]))
    decaying = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, decay in jax.tree.leaves_with_path(mask)
        if decay
    }
    assert {name.rpartition(".")[2] for name in decaying} == {"kernel", "embedding"}
    assert "bert.layers.1.attention.qkv.kernel" in decaying
    assert "bert.embeddings.word.embedding" in decaying


def test_muon_is_for_matrices_inside_the_model():
    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"kernel": leaf(4, 8), "bias": leaf(8)}
    params = {
        "embedding": {"embedding": leaf(16, 4)},
        "layers": {"0": {"attention": layer, "norm": {"scale": leaf(4)}}},
        "images": {"kernel": leaf(3, 3, 4, 8)},
        "head": {"kernel": leaf(4, 16)},
    }
    found = matrices(params)
    assert found["layers"]["0"]["attention"]["kernel"] is not None
    assert len(jax.tree.leaves(found, is_leaf=lambda x: hasattr(x, "_fields"))) == 1
