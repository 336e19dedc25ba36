"""The whole training step, compiled for a cluster of GPUs that is not there.

The step is `train.pretrain`'s own: its model, its optimizer, its exchange. XLA must be
told before jax is imported that there is no driver and nothing to tune on, so that
`compile_step` runs this module as a process of its own.

References:
  https://docs.jax.dev/en/latest/aot.html
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import onebit_jax
from models import PreTrainingBatch
from train.bert.masked_pairs import num_predictions
from train.bert.objective import abstract_params, training_loss
from train.core.errors import InputError
from train.core.exchange import EXCHANGES, make_exchange
from train.core.mesh import AXIS, DEVICE, HOST
from train.core.optimizer import learning_rate_schedule, make_optimizer
from train.core.totals import EVERY
from train.plan.config import SIZES, PlanConfig
from train.plan.targets import GPUS, Gpu

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax.sharding import Mesh

    from models import BertConfig

FREEZE_STEP = 23_000

SHARDED_FROM = 256
"""Size from which an axis is divided between the GPUs of a host: more than a model has
layers, whose axis stays whole."""


def compile_step(config: PlanConfig) -> dict[str, Any]:
    """Compiles the step in a process that knows of no GPU, and gives its `report`.

    Raises:
      InputError: It does not compile; XLA's message, if any, is on the standard error.
    """
    values = dataclasses.asdict(config) | {"json": None}
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    environment = os.environ | {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": flags.strip(),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compiled.json")
        command = [sys.executable, "-m", "train.plan.compile", json.dumps(values)]
        done = subprocess.run([*command, str(file)], env=environment, check=False)
        if status := done.returncode:
            why = "what XLA said is above"
            if status < 0:
                why = f"the compiler was killed by {signal.Signals(-status).name}"
            raise InputError(
                f"it does not compile ({why}); where memory did not suffice, give "
                "fewer GPUs, a smaller --batch or --remat."
            )
        return json.loads(file.read_text(encoding="utf-8"))


def make_mesh(gpu: str, axis_sizes: Mapping[str, int]) -> Mesh:
    """A mesh of GPUs that are not there.

    Args:
      gpu: A name of `train.plan.targets.GPUS` that XLA can compile for.
      axis_sizes: From an axis' name to its size: hosts and then GPUs of each, or GPUs
        alone.

    Returns:
      The mesh.
    """
    shape = tuple(axis_sizes.values())
    hosts, gpus = shape if len(shape) == 2 else (1, *shape)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=GPUS[gpu].target,
        topology=f"1x{hosts}x{gpus}",
    )
    return topologies.make_mesh(topology, shape, tuple(axis_sizes))


def needed_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The memory that a program needs on a device, in bytes.

    Args:
      compiled: The program.

    Returns:
      Its arguments, its outputs, those of them that are in place, its temporaries, and
      all of it together.

    Raises:
      ValueError: The backend does not tell.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError("this backend does not tell the memory of its programs")
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "in_place": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }
    return parts | {"together": sum(parts.values()) - 2 * parts["in_place"]}


def memory_on(compiled: jax.stages.Compiled, gpu: Gpu) -> dict[str, Any]:
    """The memory that a program needs, beside a GPU's, and whether it fits."""
    needed = needed_memory(compiled)
    fits = needed["together"] <= gpu.memory
    return needed | {"gpu": gpu.memory, "fits": fits}


def compiled_model(config: PlanConfig) -> BertConfig:
    """The model as it is compiled: bfloat16, a loop over the layers."""
    return dataclasses.replace(
        SIZES[config.model],
        dtype="bfloat16",
        scan=True,
        remat="layer" if config.remat else "none",
        batch_axis=DEVICE if config.fsdp else None,
    )


def report(config: PlanConfig) -> dict[str, Any]:
    """Compiles the step here: seconds, memory and collectives, as JSON values."""
    axes = {HOST: config.hosts, DEVICE: config.gpus}
    if 1 in axes.values():
        axes = {AXIS: config.hosts * config.gpus}
    mesh = make_mesh(config.gpu, axes)
    started, worked = time.perf_counter(), time.process_time()
    lowered = trace(config, mesh).lower(lowering_platforms=("cuda",))
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    seconds = {
        "trace": lowered_at - started,
        "compile": time.perf_counter() - lowered_at,
        "of_all_cores": time.process_time() - worked,
    }
    traffic = onebit_jax.traffic(compiled, mesh)
    return {
        "jax": jax.__version__,
        "mesh": dict(mesh.shape),
        "seconds": seconds,
        "memory": memory_on(compiled, GPUS[config.gpu]),
        "sent": {
            stage or EVERY: {
                axis: traffic.sent_bytes(stage, axis) for axis in mesh.axis_names
            }
            for stage in traffic.stages or (None,)
        },
        "collectives": [c._asdict() for c in traffic.collectives],
        "table": str(traffic),
    }


def trace(config: PlanConfig, mesh: Mesh) -> Any:
    """The training step, both its stages, traced with its arguments' shapes alone."""
    model = compiled_model(config)
    params, specs = abstract_params(model), None
    if config.fsdp:
        specs = jax.tree.map(lambda x: _sharded(x.shape, mesh.shape[DEVICE]), params)
        exchange = onebit_jax.per_shard(EXCHANGES[config.exchange](HOST), specs)
    else:
        exchange = make_exchange(mesh, config.exchange, config.topology)
    tx = make_optimizer(
        "onebit_adam",
        learning_rate_schedule(4e-4, 12_500, 152_000),
        onebit_jax.freeze_at(FREEZE_STEP),
        exchange,
        weight_decay=0.01,
        clip=1.0,
    )
    loss = training_loss(model, 0, exchange.axes, config.accumulate)
    run = onebit_jax.data_parallel(loss, tx, mesh, axis=exchange.axes, specs=specs)
    everywhere = PartitionSpec()
    specs = specs or jax.tree.map(lambda _: everywhere, params)
    params = jax.tree.map(lambda x, spec: _placed(x, mesh, spec), params, specs)
    state = onebit_jax.abstract_state(tx, params, mesh)
    number = _placed(jax.ShapeDtypeStruct((), jnp.uint32), mesh, everywhere)
    return run.step.trace(params, state, _abstract_batch(config, mesh), number)


def _abstract_batch(config: PlanConfig, mesh: Mesh) -> PreTrainingBatch:
    n, length = config.batch * config.accumulate * mesh.size, config.seq
    predicted = num_predictions(length)

    def each(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        array = jax.ShapeDtypeStruct((n, *shape), dtype)
        return _placed(array, mesh, PartitionSpec(mesh.axis_names))

    return PreTrainingBatch(
        token_ids=each(length),
        token_types=each(length),
        lengths=each(),
        masked_positions=each(predicted),
        masked_labels=each(predicted),
        masked_weights=each(predicted, dtype=jnp.float32),
        next_sentence_labels=each(),
    )


def _placed(
    array: jax.ShapeDtypeStruct, mesh: Mesh, spec: PartitionSpec
) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _sharded(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """Fully sharded inside the host: the first long axis that can be divided."""
    for axis, size in enumerate(shape):
        if size >= SHARDED_FROM and size % devices == 0:
            return PartitionSpec(*[None] * axis, DEVICE)
    return PartitionSpec()


def describe(compiled: dict[str, Any], config: PlanConfig) -> str:
    """The value of `report` in words and a table."""
    memory, seconds = compiled["memory"], compiled["seconds"]
    gigabytes = {
        name: f"{memory[name] / 1e9:.1f}"
        for name in ("arguments", "temporaries", "together", "gpu")
    }
    apart = (memory["outputs"] - memory["in_place"]) / 1e9
    axes = " x ".join(f"{size} {name}" for name, size in compiled["mesh"].items())
    lines = [
        f"compiled for {axes} of {GPUS[config.gpu].label} by jax {compiled['jax']} in "
        f"{seconds['trace'] + seconds['compile']:.0f} s, "
        f"{seconds['of_all_cores']:.0f} s of one core",
        f"a GPU holds {gigabytes['arguments']} GB of arguments, "
        f"{gigabytes['temporaries']} GB of temporaries, {apart:.1f} GB of outputs that "
        f"are not in place: {gigabytes['together']} of {gigabytes['gpu']} GB, which "
        f"{'fits' if memory['fits'] else 'does not fit'}",
        "",
        compiled["table"],
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    given, out = sys.argv[1:]
    found = report(PlanConfig(**json.loads(given)))
    Path(out).write_text(json.dumps(found), encoding="utf-8")
