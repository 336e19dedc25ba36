"""Times, rates and FLOP of BERT are what the page says they are."""

import importlib.util
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.bert.command import main
from benchmarks.bert.config import Config, check
from benchmarks.bert.implementations import COMPILED, EAGER, OURS, Implementation
from benchmarks.bert.measure import baseline_of, seconds_of_pass, timing
from benchmarks.bert.programs import (
    Shape,
    make_batch,
    model_config,
    programs,
    step_optimizer,
)
from models import SIZES
from onebit_jax import data_parallel
from onebit_jax.exchanges.block_exchange import ErrorFeedbackState
from train.bert.objective import abstract_params
from train.core.errors import InputError
from train.core.mesh import make_mesh
from train.plan.flops import OF_FORWARD, forward_flops, step_flops

BATCH, LENGTH = 2, 16
SHAPE = Shape("tiny", LENGTH, BATCH, "float32")
NO_TORCH = not all(map(importlib.util.find_spec, ("torch", "transformers")))


def products(jaxpr, times=1):
    """FLOP of the matrix products that a program is traced to."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            size = math.prod(shape[axis] for axis in contracted)
            total += times * 2 * size * math.prod(equation.outvars[0].aval.shape)
        turns = equation.params.get("length", 1)
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "jaxpr"):
                total += products(inner.jaxpr, times * turns)
            elif hasattr(inner, "eqns"):
                total += products(inner, times * turns)
    return total


def test_flops_are_those_of_the_programs_products():
    config = model_config(SHAPE, "xla", "none", scan=True)
    made = programs(config, step_optimizer("adam"), make_mesh(1))
    args = abstract_params(config), make_batch(config, SHAPE), np.uint32(0)
    forward = BATCH * forward_flops(config, LENGTH, SHAPE.predictions)
    counted = {
        name: products(jax.make_jaxpr(getattr(made, name))(*args).jaxpr)
        for name in ("forward", "gradients")
    }
    assert counted["forward"] == forward
    backward = counted["gradients"] - counted["forward"]
    assert backward == OF_FORWARD["backward"] * forward
    # What the planner takes a step for.
    assert counted["gradients"] == BATCH * step_flops(config, LENGTH)


def test_one_device_does_a_workers_work_of_encoding():
    """Alone, a worker of the product's exchange encodes nothing: its step is Adam's."""
    tx = step_optimizer("onebit_adam")
    run = data_parallel(lambda p, x: jnp.sum(p["kernel"] * x[0]), tx, make_mesh(1))
    batch = jax.random.normal(jax.random.key(0), (1, 64, 64))
    params, state = run.init({"kernel": jnp.ones((64, 64))})
    for _ in range(3):
        params, state, _ = run.step(params, state, batch)
    parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ErrorFeedbackState))
    (errors,) = (x for x in parts if isinstance(x, ErrorFeedbackState))
    error = errors.worker_error.value["kernel"]
    assert np.count_nonzero(error) > 0.9 * error.size


def implementation(name):
    return Implementation(name, "xla", "none", 2, {}, id, {"gradients": 7})


def test_a_timing_follows_from_its_seconds():
    seconds = {"forward": [1.0, 2.0, 1.0], "gradients": [4.0, 6.0, 4.0]}
    backward = seconds_of_pass("backward", seconds)
    assert backward == [3.0, 4.0, 3.0]
    assert seconds_of_pass("forward", seconds) == seconds["forward"]
    row = timing(SHAPE, implementation(OURS), "backward", backward, [6.0] * 3, 1e-6)
    flops = 2 * BATCH * forward_flops(SIZES["tiny"], LENGTH, 2)
    assert row.flops == flops
    assert row.milliseconds == [3000, 3000, 3500]
    assert row.examples_per_second == pytest.approx(BATCH / 3)
    assert row.tflops_per_second == pytest.approx(flops / 3e12)
    assert row.of_peak == pytest.approx(flops / 3e6)
    assert row.speed_up == [1.75, 2, 2]
    # Of the program that computes the gradients.
    assert row.held_bytes == 7


def test_the_baseline_is_pytorch_where_it_runs():
    def baseline(*names):
        return names[baseline_of([implementation(name) for name in names])]

    assert baseline(EAGER, COMPILED, OURS) == COMPILED
    assert baseline(EAGER, OURS) == EAGER
    assert baseline(OURS, OURS) == OURS


@pytest.mark.slow
def test_what_runs_is_measured_and_what_does_not_is_said(tmp_path, capsys):
    file, page = tmp_path / "bert.json", tmp_path / "bert.md"
    page.write_text("before\n<!-- cpu -->\nold\n<!-- end of cpu -->\nafter\n")
    config = Config(
        models=("tiny",),
        seqs=(LENGTH,),
        batch=BATCH,
        attentions=("xla", "cudnn"),
        passes=("step",),
        peers=(),
        repeats=2,
        json=file,
        page=page,
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        main(config)
    printed, stored = capsys.readouterr(), json.loads(file.read_text())
    (step,) = stored["rows"]
    assert (step["name"], len(step["seconds"])) == ("step", 2)
    parameters = sum(x.size for x in jax.tree.leaves(abstract_params(SIZES["tiny"])))
    # Parameters and two moments, and more for the gradients.
    assert step["held_bytes"] > 4 * 4 * parameters
    assert f"\n{printed.out}\n<!-- end of cpu -->" in page.read_text()
    _, cudnn = stored["skipped"]
    assert cudnn.startswith(f"tiny, {BATCH} x {LENGTH}, attention cudnn, remat none")
    assert "not measured: cuDNN's attention computes in bfloat16" in cudnn
    assert cudnn in printed.err
    assert f"- {cudnn}" in printed.out


@pytest.mark.skipif(NO_TORCH, reason="needs torch and transformers")
def test_hugging_face_computes_the_same_sizes():
    from benchmarks.bert.hugging_face import HuggingFace

    config = model_config(SHAPE, "xla", "none", scan=False)
    peer = HuggingFace(config, SHAPE, "cpu")
    ours = jax.tree.leaves(abstract_params(config))
    assert sum(p.numel() for p in peer.parameters) == sum(x.size for x in ours)
    labels = peer.inputs["labels"]
    assert int((labels >= 0).sum()) == BATCH * SHAPE.predictions
    calls = peer.calls(compiled=False)
    losses = [float(peer.wait(calls["step"]())) for _ in range(3)]
    assert losses[2] < losses[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"models": ("huge",)}, "--models knows tiny, mini"),
        ({"batch": 0}, "--seqs, --batch, --repeats and --calls must be at least 1"),
        ({"passes": ()}, "--passes and --remats need one at least"),
    ],
)
def test_flags_that_cannot_be_measured_with_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        check(Config(**flags))
