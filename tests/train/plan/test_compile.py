"""The step that `--compile` compiles, in a process of its own, and its words on it."""

import dataclasses
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from runs import PROMOTION

from train.bert.masked_pairs import num_predictions
from train.core.errors import InputError
from train.plan import compile as plan_compile
from train.plan import config
from train.plan.command import main
from train.plan.compile import compile_step, needed_memory, trace
from train.plan.config import PlanConfig


@pytest.mark.parametrize("fsdp", [False, True])
def test_the_step_that_is_compiled_is_that_of_pretraining(fsdp):
    """Its micro-batches are parts of one step, whose arguments are the whole batch."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    cluster = {"rate": 1.0, "hosts": 2, "gpus": 2, "fsdp": fsdp}
    asked = PlanConfig(**cluster, model="tiny", batch=2, accumulate=3, seq=20)
    with PROMOTION:
        (_, _, batch, _), _ = trace(asked, mesh).args_info
    assert batch.token_ids.shape == (4 * 2 * 3, 20)
    assert batch.masked_positions.shape[1] == num_predictions(20)


def test_memory_counts_outputs_in_place_once():
    array = jax.ShapeDtypeStruct((1000,), jnp.float32)
    for donated in ((), (0,)):
        function = jax.jit(lambda x: x + 1, donate_argnums=donated)
        needed = needed_memory(function.lower(array).compile())
        assert needed["together"] == (4000 if donated else 8000) + needed["temporaries"]


@pytest.mark.parametrize(
    ("status", "why"), [(1, "what XLA said is above"), (-9, "was killed by SIGKILL")]
)
def test_a_compiler_that_fails_is_told(tmp_path, monkeypatch, status, why):
    """It is a process of its own, which has been told that there is no GPU."""

    def run(command, *, env, check):
        assert command[1:3] == ["-m", "train.plan.compile"]
        assert "--xla_gpu_autotune_level=0" in env["XLA_FLAGS"]
        assert env["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == "1"
        assert not check
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(plan_compile.subprocess, "run", run)
    asked = dataclasses.replace(PlanConfig(rate=1.0), json=tmp_path / "plan.json")
    match = rf"it does not compile \(.*{why}\); where memory .* give fewer GPUs"
    with pytest.raises(InputError, match=match):
        compile_step(asked)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=f"jax-cuda13-plugin=={jax.__version__} "):
        main(["--rate", "1", "--compile"])
