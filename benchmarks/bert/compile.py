"""BERT's training step, compiled for a GPU that is not there.

`python -m benchmarks.bert --compile h200` runs this module as a process of its own,
because XLA must be told before jax is imported that there is no driver and nothing to
tune on.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.plan.compile import INSTALL
from train.plan.targets import GPUS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bert.cases import Shape
    from benchmarks.bert.command import Config

HEADS = (
    "model",
    "sequences",
    "attention",
    "remat",
    "GB of arguments",
    "GB of temporaries",
    "GB together",
    "GB kept by the layers",
    "TFLOP",
    "compiled in",
)


@dataclass
class Compiled:
    """Steps compiled for a GPU.

    Attributes:
      platform: The GPU.
      jax: Version.
      cases: A dictionary each: the shape, seconds, bytes of memory, bytes kept for the
        backward pass by dtype, kernels by kind.
      skipped: What did not compile, and why.
    """

    platform: str
    jax: str
    cases: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def compile_all(config: Config) -> Iterator[Compiled]:
    """Compiles every case, in a process of its own.

    Args:
      config: The flags.

    Yields:
      What came out, once.

    Raises:
      SystemExit: XLA's compiler is missing, or failed.
    """
    parts = "jax_plugins", "jax_plugins.xla_cuda13"
    if not all(importlib.util.find_spec(part) for part in parts):
        import jax

        raise SystemExit(INSTALL.format(jax.__version__))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": flags.strip(),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    given = json.dumps(dataclasses.asdict(config) | {"json": None, "page": None})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compiled.json")
        command = [sys.executable, "-m", "benchmarks.bert.compile", given, str(file)]
        if subprocess.run(command, env=environment, check=False).returncode:
            raise SystemExit("the steps do not compile; what XLA said is above.")
        yield Compiled(**json.loads(file.read_text("utf-8")))


def compile_here(config: Config) -> Compiled:
    """Compiles every case in this process, which has been told that there is no GPU."""
    import jax

    from benchmarks.bert.cases import shapes, variants

    assert config.compile is not None
    found = Compiled(config.compile, jax.__version__)
    for shape in shapes(config, "gpu"):
        for attention, remat in variants(config, "gpu"):
            try:
                case = _compile(config, shape, attention, remat)
            # Parts that do not go together, or a library that is missing.
            except (ValueError, RuntimeError) as error:
                line = (
                    f"{shape.model}, {shape.batch} x {shape.length}, attention "
                    f"{attention}, remat {remat}: not compiled: {error}"
                )
                print(line, file=sys.stderr)
                found.skipped.append(line)
            else:
                found.cases.append(case)
    return found


def _compile(
    config: Config, shape: Shape, attention: str, remat: str
) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    import onebit_jax
    from benchmarks.bert import cases as bert_cases
    from benchmarks.bert.flops import OF_FORWARD, forward_flops
    from benchmarks.bert.kernels import kept, kernels
    from train.bert.objective import abstract_params
    from train.core.mesh import AXIS

    gpu = GPUS[config.compile or "h200"]
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=gpu.target, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), (AXIS,))

    def placed(tree: Any, *axes: str) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    model = bert_cases.model_config(shape, attention, remat, scan=config.scan)
    tx = bert_cases.optimizer(config.optimizer)
    params = placed(abstract_params(model))
    state = onebit_jax.abstract_state(tx, params, mesh)
    batch = placed(bert_cases.make_batch(model, shape), AXIS)
    number = placed(jax.ShapeDtypeStruct((), jnp.uint32))
    started = time.perf_counter()
    traced = bert_cases.programs(model, tx, mesh).step.trace(
        params, state, batch, number
    )
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    seconds = time.perf_counter() - started
    memory, text = compiled.memory_analysis(), compiled.as_text()
    held = bert_cases.held_bytes(compiled)
    flops = forward_flops(model, shape.length, shape.predictions)
    return {
        **shape._asdict(),
        "attention": attention,
        "remat": remat,
        "scan": config.scan,
        "optimizer": config.optimizer,
        "predictions": shape.predictions,
        "flops": OF_FORWARD["step"] * shape.batch * flops,
        "seconds": seconds,
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "in_place": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "together": held,
            "gpu": gpu.memory,
            "fits": held <= gpu.memory,
        },
        "kept": dict(kept(text, model.num_layers, shape.batch, shape.length))
        if config.scan
        else {},
        "kernels": dict(kernels(text)),
    }


def table(found: Compiled) -> str:
    """What was compiled, as Markdown.

    Args:
      found: It.

    Returns:
      A table of memory and one of kernels.
    """
    lines = [
        f"jax {found.jax}, for {GPUS[found.platform].label}, which holds "
        f"{GPUS[found.platform].memory / 1e9:.0f} GB",
        "",
        f"| {' | '.join(HEADS)} |",
        "|---" * len(HEADS) + "|",
    ]
    kinds: list[str] = []
    for case in found.cases:
        kinds += [kind for kind in case["kernels"] if kind not in kinds]
        memory = case["memory"]
        kept = ", ".join(f"{n / 1e9:.1f} {k}" for k, n in sorted(case["kept"].items()))
        cells = (
            *_names(case),
            *(
                f"{memory[name] / 1e9:.1f}"
                for name in ("arguments", "temporaries", "together")
            ),
            kept,
            f"{case['flops'] / 1e12:.1f}",
            f"{case['seconds']:.0f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    heads = (*HEADS[:4], *kinds)
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in found.cases:
        cells = (*_names(case), *(str(case["kernels"].get(kind, 0)) for kind in kinds))
        lines.append(f"| {' | '.join(cells)} |")
    skipped = [f"- {line}" for line in found.skipped]
    return "\n".join([*lines, "", *skipped]).rstrip()


def _names(case: dict[str, Any]) -> tuple[str, ...]:
    sequences = f"{case['batch']} x {case['length']}"
    return case["model"], sequences, case["attention"], case["remat"]


def main() -> None:
    """The process that compiles."""
    from benchmarks.bert.command import Config

    given, file = sys.argv[1:]
    found = compile_here(Config(**json.loads(given)))
    Path(file).write_text(json.dumps(dataclasses.asdict(found)), "utf-8")


if __name__ == "__main__":
    main()
