"""BERT's training step, compiled for a GPU that is not there.

`python -m benchmarks.bert --compile h200` runs this module as a process of its own.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import onebit_jax
from benchmarks.bert.config import Config
from benchmarks.bert.programs import (
    make_batch,
    model_config,
    programs,
    shapes,
    step_optimizer,
    variants,
)
from benchmarks.bert.results import Compiled
from train.bert.objective import abstract_params
from train.core.mesh import AXIS
from train.plan import gpu_compiler
from train.plan.flops import OF_FORWARD, forward_flops
from train.plan.gpu_program import bytes_for_backward, kernels, memory_on
from train.plan.targets import GPUS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bert.programs import Shape


def compile_all(config: Config) -> Iterator[Compiled]:
    """Compiles every step, in a process of its own.

    Args:
      config: The flags.

    Yields:
      All that was compiled, once.

    Raises:
      InputError: XLA's compiler is missing, or failed.
    """
    gpu_compiler.check_installed()
    yield Compiled(**gpu_compiler.run("benchmarks.bert.compile", config))


def compile_here(config: Config) -> dict[str, Any]:
    """Compiles every step in this process, which has been told that there is no GPU.

    Args:
      config: The flags.

    Returns:
      A `Compiled` as a dictionary.
    """
    assert config.compile is not None
    compiled = Compiled(config.compile, jax.__version__)
    for shape in shapes(config, "gpu"):
        for attention, remat in variants(config, "gpu"):
            try:
                step = _compile(config, config.compile, shape, attention, remat)
            # Parts that do not go together, or a library that is missing.
            except (ValueError, RuntimeError) as error:
                line = (
                    f"{shape.model}, {shape.batch} x {shape.length}, attention "
                    f"{attention}, remat {remat}: not compiled: {error}"
                )
                print(line, file=sys.stderr)
                compiled.skipped.append(line)
            else:
                compiled.cases.append(step)
    return dataclasses.asdict(compiled)


def _compile(
    config: Config, gpu: str, shape: Shape, attention: str, remat: str
) -> dict[str, Any]:
    mesh = gpu_compiler.make_mesh(gpu, {AXIS: 1})

    def placed(tree: Any, *axes: str) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    model = model_config(shape, attention, remat, scan=config.scan)
    tx = step_optimizer(config.optimizer)
    params = placed(abstract_params(model))
    state = onebit_jax.abstract_state(tx, params, mesh)
    batch = placed(make_batch(model, shape), AXIS)
    number = placed(jax.ShapeDtypeStruct((), jnp.uint32))
    started = time.perf_counter()
    traced = programs(model, tx, mesh).step.trace(params, state, batch, number)
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    seconds = time.perf_counter() - started
    text = compiled.as_text()
    layers, flops = (
        model.num_layers,
        forward_flops(model, shape.length, shape.predictions),
    )
    kept = (
        bytes_for_backward(text, layers, shape.batch, shape.length)
        if config.scan
        else {}
    )
    return {
        **shape._asdict(),
        "attention": attention,
        "remat": remat,
        "scan": config.scan,
        "optimizer": config.optimizer,
        "predictions": shape.predictions,
        "flops": OF_FORWARD["step"] * shape.batch * flops,
        "seconds": seconds,
        "memory": memory_on(compiled, GPUS[gpu]),
        "kept": dict(kept),
        "kernels": dict(kernels(text)),
    }


if __name__ == "__main__":
    gpu_compiler.serve(Config, compile_here)
