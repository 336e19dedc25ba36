"""The whole training step, compiled for a cluster of GPUs that is not there.

`python -m train.plan --compile` runs this module as a process of its own, because XLA
must be told before jax is imported that there is no driver and nothing to tune on.
The step is `train.pretrain`'s own: its model, its optimizer, its exchange.

References:
  https://docs.jax.dev/en/latest/aot.html
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.core.errors import InputError
from train.plan.sizes import SIZES
from train.plan.targets import GPUS

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

    from models import BertConfig
    from train.plan.command import PlanConfig

INSTALL = (
    "--compile needs XLA's compiler for NVIDIA GPUs, but no GPU: pip install --no-deps "
    "jax-cuda13-plugin=={0} jax-cuda13-pjrt=={0} nvidia-cuda-nvcc nvidia-nvvm "
    "nvidia-cuda-crt nvidia-cuda-runtime (700 MB)."
)

FREEZE_STEP = 23_000

SHARDED_FROM = 256
"""Shortest axis that is divided between the GPUs of a host; not that of the layers."""


def check_compiler(config: PlanConfig) -> None:
    """Refuses what cannot be compiled.

    Raises:
      InputError: XLA's compiler is missing, or it does not know the GPU or the model.
    """
    if not GPUS[config.gpu].target:
        can = ", ".join(name for name, gpu in GPUS.items() if gpu.target)
        raise InputError(f"--compile knows the GPUs {can}, not {config.gpu}.")
    if config.model not in SIZES:
        raise InputError(f"--compile needs the shapes of one of {', '.join(SIZES)}.")
    if config.fsdp and (config.hosts == 1 or config.gpus == 1):
        raise InputError("--fsdp needs several hosts of several GPUs.")
    parts = "jax_plugins", "jax_plugins.xla_cuda13"
    if not all(importlib.util.find_spec(part) for part in parts):
        import jax

        raise InputError(INSTALL.format(jax.__version__))


def compile_step(config: PlanConfig) -> dict[str, Any]:
    """Compiles in a process of its own.

    Args:
      config: The flags.

    Returns:
      What `report` says.

    Raises:
      InputError: The step does not compile.
    """
    given = json.dumps(dataclasses.asdict(config) | {"json": None})
    root = str(Path(__file__).resolve().parents[2])
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    environment = os.environ | {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": flags.strip(),
        "PYTHONPATH": os.pathsep.join(
            [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        command = [sys.executable, "-m", "train.plan.compile", given, str(file)]
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            raise InputError(
                "the step does not compile for this cluster; what XLA said is above."
            )
        return json.loads(file.read_text())


def shapes(config: PlanConfig) -> BertConfig:
    """The model as it is compiled: bfloat16, a loop over the layers."""
    from train.core.mesh import DEVICE

    return dataclasses.replace(
        SIZES[config.model],
        dtype="bfloat16",
        scan=True,
        remat="layer" if config.remat else "none",
        batch_axis=DEVICE if config.fsdp else None,
    )


def report(config: PlanConfig) -> dict[str, Any]:
    """Compiles the step here, and says what came out.

    Args:
      config: The flags.

    Returns:
      Seconds of compilation, bytes of memory, collectives, as JSON values.
    """
    import jax
    from jax.experimental import topologies

    import onebit_jax
    from train.plan.schedule import in_flight

    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=GPUS[config.gpu].target,
        topology=f"1x{config.hosts}x{config.gpus}",
    )
    shape, names = _axes(config)
    mesh = topologies.make_mesh(topology, shape, names)
    started, worked = time.perf_counter(), time.process_time()
    lowered = trace(config, mesh).lower(lowering_platforms=("cuda",))
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    worked = time.process_time() - worked
    traffic = onebit_jax.traffic(compiled, mesh)
    memory = compiled.memory_analysis()
    held = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    stages = traffic.stages or (None,)
    return {
        "jax": jax.__version__,
        "mesh": dict(mesh.shape),
        "seconds": {
            "trace": lowered_at - started,
            "compile": done - lowered_at,
            "of_all_cores": worked,
        },
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "in_place": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "together": held,
            "gpu": GPUS[config.gpu].memory,
            "fits": held <= GPUS[config.gpu].memory,
        },
        "sent": {
            stage or "every": {
                axis: traffic.sent_bytes(stage, axis) for axis in mesh.axis_names
            }
            for stage in stages
        },
        "collectives": [c._asdict() for c in traffic.collectives],
        "in_flight": [c._asdict() for c in in_flight(compiled.as_text())],
        "table": str(traffic),
    }


def _axes(config: PlanConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    from train.core.mesh import AXIS, DEVICE, HOST

    if config.hosts > 1 and config.gpus > 1:
        return (config.hosts, config.gpus), (HOST, DEVICE)
    return (config.hosts * config.gpus,), (AXIS,)


def trace(config: PlanConfig, mesh: Mesh) -> Any:
    """Traces the training step with the shapes of its arguments alone.

    Args:
      config: The flags.
      mesh: The GPUs.

    Returns:
      The traced step, both of its stages.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import onebit_jax
    from models import PreTrainingBatch
    from train.bert.objective import abstract_params, training_loss
    from train.core.exchange import EXCHANGES, make_exchange
    from train.core.mesh import DEVICE, HOST
    from train.core.optimizer import learning_rate_schedule, make_optimizer
    from train.plan.model import MASKED_SHARE

    def placed(shape: Any, dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    model = shapes(config)
    params, specs = abstract_params(model), None
    name = {"signs": "sign_mean", "counts": "count_mean"}[config.wire]
    if config.fsdp:
        specs = jax.tree.map(lambda x: _sharded(x.shape, mesh.shape[DEVICE]), params)
        exchange = onebit_jax.per_shard(EXCHANGES[name](HOST), specs)
    else:
        exchange = make_exchange(mesh, name, config.topology)
    tx = make_optimizer(
        "onebit_adam",
        learning_rate_schedule(4e-4, 12_500, 152_000),
        onebit_jax.freeze_at(FREEZE_STEP),
        exchange,
        weight_decay=0.01,
        clip=1.0,
    )
    if config.accumulate > 1:
        tx = onebit_jax.accumulate(tx, config.accumulate, exchange.axes)
    step = onebit_jax.data_parallel(
        training_loss(model, 0, exchange.axes),
        tx,
        mesh,
        axis=exchange.axes,
        specs=specs,
    ).step
    everywhere, split = PartitionSpec(), PartitionSpec(mesh.axis_names)
    params = jax.tree.map(
        lambda x, spec: placed(x.shape, x.dtype, spec),
        params,
        specs or jax.tree.map(lambda _: everywhere, params),
    )
    state = onebit_jax.abstract_state(tx, params, mesh)
    n, length = config.batch * mesh.size, config.seq
    places = round(MASKED_SHARE * length) + 1
    batch = PreTrainingBatch(
        token_ids=placed((n, length), jnp.int32, split),
        token_types=placed((n, length), jnp.int32, split),
        lengths=placed((n,), jnp.int32, split),
        masked_positions=placed((n, places), jnp.int32, split),
        masked_labels=placed((n, places), jnp.int32, split),
        masked_weights=placed((n, places), jnp.float32, split),
        next_sentence_labels=placed((n,), jnp.int32, split),
    )
    return step.trace(params, state, batch, placed((), jnp.uint32, everywhere))


def _sharded(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """Fully sharded inside the host: the first long axis that can be divided."""
    from jax.sharding import PartitionSpec

    from train.core.mesh import DEVICE

    for axis, size in enumerate(shape):
        if size >= SHARDED_FROM and size % devices == 0:
            return PartitionSpec(*[None] * axis, DEVICE)
    return PartitionSpec()


def describe(found: dict[str, Any], config: PlanConfig) -> str:
    """What was compiled, in words and a table."""
    memory, seconds = found["memory"], found["seconds"]
    gigabytes = {
        name: f"{memory[name] / 1e9:.1f}"
        for name in ("arguments", "temporaries", "together", "gpu")
    }
    apart = (memory["outputs"] - memory["in_place"]) / 1e9
    axes = " x ".join(f"{size} {name}" for name, size in found["mesh"].items())
    lines = [
        f"compiled for {axes} of {GPUS[config.gpu].label} by jax {found['jax']} in "
        f"{seconds['trace'] + seconds['compile']:.0f} s, "
        f"{seconds['of_all_cores']:.0f} s of one core",
        f"a GPU holds {gigabytes['arguments']} GB of arguments, "
        f"{gigabytes['temporaries']} GB of temporaries, {apart:.1f} GB of outputs that "
        f"are not in place: {gigabytes['together']} of {gigabytes['gpu']} GB, which "
        f"{'fits' if memory['fits'] else 'does not fit'}",
        "",
        found["table"],
        "",
        "in the schedule, kernels between a collective's start and its end:",
    ]
    kernels: dict[tuple[str, str], list[int]] = {}
    for c in found["in_flight"]:
        kernels.setdefault((c["op"], c["result"]), []).append(c["work"])
    for (op, result), work in kernels.items():
        times = f"{len(work)} x " if len(work) > 1 else ""
        counts = " ".join(map(str, work)) if any(work) else "none (synchronous)"
        lines.append(f"  {times}{op} to {result}: {counts}")
    return "\n".join(lines)


def main() -> None:
    """The process that compiles."""
    from train.plan.command import PlanConfig

    given, file = sys.argv[1:]
    config = PlanConfig(**json.loads(given))
    Path(file).write_text(json.dumps(report(config)))


if __name__ == "__main__":
    main()
