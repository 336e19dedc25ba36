"""A task of your own: data, a loss, an evaluation, and the trainers' loop."""

import tempfile
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np

from train.core import metrics_log
from train.core.batches import batches
from train.core.flags import FromScratchFlags
from train.core.loop import train
from train.core.mesh import make_mesh
from train.core.processes.watchdog import Watchdog
from train.core.task import Task, planned_phase

jax.config.update("jax_num_cpu_devices", 4)
SIZE = 64
mesh = make_mesh(4)
target = np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype(np.float32)


def example(index, rng):
    """Example i, a function of the seed and i alone."""
    del index
    x = rng.normal(size=SIZE).astype(np.float32)
    return {"x": x, "y": x @ target}


def loss(params, batch, step):
    """The mean loss of a worker's share of the batch."""
    del step
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def evaluation(params):
    """Compiles nothing here, and returns what evaluates."""
    return lambda params: {"loss": float(jnp.mean((params["w"] - target) ** 2))}


data = grain.MapDataset.range(1000).seed(0).shuffle().repeat().random_map(example)
with tempfile.TemporaryDirectory() as out, Watchdog(300) as watchdog:
    flags = FromScratchFlags(
        out=Path(out),
        steps=40,
        batch=16,
        learning_rate=3e-2,
        freeze_step=10,
        weight_decay=0.0,
        clip=0.0,
        log_every=10,
    )
    phase = planned_phase(
        flags,
        flags.phases[0],
        flags.steps,
        mesh,
        loss=loss,
        batches=batches(data, flags.batch),
        evaluation=evaluation,
        eval_every=20,
    )
    task = Task(
        name="matrix",
        model={"size": SIZE},
        init=lambda: {"w": jnp.zeros((SIZE, SIZE))},
        phases=[phase],
    )
    train(task, flags, flags.steps, mesh, watchdog)
    for line in metrics_log.read(Path(out)):
        print(line)
