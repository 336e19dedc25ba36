"""The whole training step, compiled for a cluster of GPUs that is not there.

`python -m train.plan --compile` runs this module as a process of its own. The step is
`train.pretrain`'s own: its model, its optimizer, its exchange.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import onebit_jax
from models import PreTrainingBatch
from train.bert.masked_pairs import num_predictions
from train.bert.objective import abstract_params, training_loss
from train.core.exchange import EXCHANGES, make_exchange
from train.core.mesh import AXIS, DEVICE, HOST
from train.core.optimizer import learning_rate_schedule, make_optimizer
from train.core.totals import EVERY
from train.plan import gpu_compiler
from train.plan.config import PlanConfig
from train.plan.gpu_program import in_flight, memory_on
from train.plan.sizes import SIZES
from train.plan.targets import GPUS

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from models import BertConfig

FREEZE_STEP = 23_000

SHARDED_FROM = 256
"""Size from which an axis is divided between the GPUs of a host: more than a model has
layers, whose axis stays whole."""


def compile_step(config: PlanConfig) -> dict[str, Any]:
    """Compiles the step in a process of its own.

    Args:
      config: The flags.

    Returns:
      The value of `report`.

    Raises:
      InputError: The step does not compile.
    """
    return gpu_compiler.run("train.plan.compile", config)


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
    """Compiles the step in this process.

    Args:
      config: The flags.

    Returns:
      Seconds of compilation, bytes of memory, collectives, as JSON values.
    """
    axes = {HOST: config.hosts, DEVICE: config.gpus}
    if 1 in axes.values():
        axes = {AXIS: config.hosts * config.gpus}
    mesh = gpu_compiler.make_mesh(config.gpu, axes)
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
        "in_flight": [c._asdict() for c in in_flight(compiled.as_text())],
        "table": str(traffic),
    }


def trace(config: PlanConfig, mesh: Mesh) -> Any:
    """Traces the training step with the shapes of its arguments alone.

    Args:
      config: The flags.
      mesh: The GPUs.

    Returns:
      The traced step, both of its stages.
    """
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
        "",
        "in the schedule, kernels between a collective's start and its end:",
    ]
    kernels: dict[tuple[str, str], list[int]] = {}
    for c in compiled["in_flight"]:
        kernels.setdefault((c["op"], c["result"]), []).append(c["work"])
    for (op, result), work in kernels.items():
        times = f"{len(work)} x " if len(work) > 1 else ""
        counts = " ".join(map(str, work)) if any(work) else "none (synchronous)"
        lines.append(f"  {times}{op} to {result}: {counts}")
    return "\n".join(lines)


if __name__ == "__main__":
    gpu_compiler.serve(PlanConfig, report)
