"""Whole runs: their stages are the optimizers' own, their bytes those of the stages."""

import jax
import jax.numpy as jnp
import pytest

from train.core.optimizer import OPTIMIZERS
from train.plan.cluster import GIGABIT, GpuCluster
from train.plan.family import CHOICES, family_table, predicted_runs, stage_steps
from train.plan.model import GpuWork, Model, arms

STEPS, FREEZE = 200, 40
MODEL = Model("a model", (jax.ShapeDtypeStruct((512, 256), jnp.float32),), 1e9)
WORK = GpuWork(0.05, 1, 0.005, 2e12)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_every_step_is_of_one_stage(choice):
    # Optax's own arithmetic mixes integers and floats.
    with jax.numpy_dtype_promotion("standard"):
        taken = stage_steps(choice, STEPS, FREEZE)
    assert sum(taken.values()) == STEPS
    if choice.sync:
        assert taken["sync"] == STEPS // choice.sync
    elif choice.optimizer == "zero_one_adam":
        assert taken["variance"] == 16 + (FREEZE - 16) // 2
    elif "freeze_step" in OPTIMIZERS[choice.optimizer].flags:
        assert taken["warmup"] == FREEZE


@pytest.mark.parametrize(("hosts", "gpus", "overlap"), [(8, 1, 0.0), (4, 2, 0.1)])
def test_a_run_adds_up_the_steps_that_the_table_above_it_has(hosts, gpus, overlap):
    work = WORK._replace(overlap=overlap)
    cluster = GpuCluster(hosts, gpus, GIGABIT, 100 * GIGABIT, 1e-5)
    # Optax's own arithmetic mixes integers and floats.
    with jax.numpy_dtype_promotion("standard"):
        found = predicted_runs(MODEL, work, cluster, steps=STEPS, freeze=FREEZE)
    runs = {run.name: run for run in found}
    assert next(iter(runs)) == "adam"
    above = {arm.name: arm for arm in arms(MODEL, work, cluster)}
    topology = "flat" if gpus == 1 else "hierarchical"
    for name, arm in {
        "adam": above["Adam, float32 gradients"],
        "onebit_adam": above[f"1-bit Adam, {topology}, sign_mean"],
    }.items():
        expected = FREEZE * arm.warmup.host_bytes
        expected += (STEPS - FREEZE) * arm.compressed.host_bytes
        # The growth is measured in whole steps there, in shares of all steps here.
        assert runs[name].host_bytes == pytest.approx(expected, rel=2e-3)
        assert runs[name].seconds == pytest.approx(
            STEPS * arm.seconds(FREEZE / STEPS), rel=2e-3
        )
    # Eight bits in the warm-up, a quarter of its bytes, and nothing else is another's.
    # They go round a ring of hosts, exact ones round one of all GPUs.
    n = hosts * gpus
    bits = 1 / 4 * (1 - 1 / hosts) / (1 - 1 / n)
    more = (
        runs["onebit_adam --warmup-bits 32"].host_bytes - runs["onebit_adam"].host_bytes
    )
    exact = FREEZE * runs["adam"].host_bytes / STEPS
    assert more == pytest.approx(exact * (1 - bits), rel=0.02)
    # A round is one exchange by one bit, without the growth's sums of a compressed
    # step; the mean of the loss is in every step.
    eighth, rare = (runs[f"local --sync {n}"] for n in (8, 32))
    a_round = above[f"1-bit Adam, {topology}, sign_mean"].compressed.host_bytes
    for run in (eighth, rare):
        assert run.host_bytes == pytest.approx(run.steps["sync"] * a_round, rel=0.04)
    lines = family_table(found, MODEL.parameters).splitlines()
    assert lines[2].split() == [
        "adam", f"{runs['adam'].gpu_bytes / 1e9:.2g}",
        f"{runs['adam'].host_bytes / 1e9:.2g}", "1.0",
        f"{runs['adam'].seconds / 3600:.2g}", "1.00", "8.0",
    ]  # fmt: skip
