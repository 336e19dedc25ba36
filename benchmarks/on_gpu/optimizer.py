"""The optimizer's work on BERT's parameters: Adam's update beside the compressed stage.

Parameters, state and gradient are on one device, which is the one worker of a mesh, or
simulates several: the collectives are copies, and all arithmetic is done. A worker of n
averages a share 1 / n of the values; the one worker alone averages all of them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

import onebit_jax
from benchmarks.on_gpu.device import device
from benchmarks.timing import seconds
from models import SIZES as MODELS
from train.bert.objective import abstract_params
from train.core.mesh import AXIS, make_mesh
from train.plan.gpu_program import needed_memory

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from benchmarks.on_gpu.record import Record
    from benchmarks.on_gpu.sizes import Sizes

LEARNING_RATE = 1e-3
COMPRESSED = {"stage": "compressed"}


class Case(NamedTuple):
    """An optimizer's step.

    Attributes:
      name: Its name.
      tx: The optimizer.
      implementation: What compresses; None for what compresses nothing.
      workers: That the device simulates; None for the one of a mesh.
    """

    name: str
    tx: optax.GradientTransformation
    implementation: str | None = None
    workers: int | None = None


def cases(sizes: Sizes) -> list[Case]:
    """The optimizers, in the order in which they are measured: by their memory.

    1-bit Adam as published, by default, and by default with several workers.
    """

    def onebit(implementation: Any, **parts: Any) -> optax.GradientTransformation:
        exchange = onebit_jax.sign_mean(AXIS, implementation=implementation)
        return onebit_jax.onebit_adam(
            LEARNING_RATE, exchange, onebit_jax.freeze_at(1), **parts
        )

    published: dict[str, Any] = {
        "lead": None,
        "growth": None,
        "floor": None,
        "bound": None,
    }
    both = "xla", sizes.mosaic
    return [
        Case("Adam", optax.adam(LEARNING_RATE)),
        *(
            Case(f"1-bit Adam{form}", onebit(name, **parts), name)
            for form, parts in ((", as published", published), ("", {}))
            for name in both
            if form not in sizes.without
        ),
        Case(
            f"1-bit Adam, {sizes.workers} workers on it",
            onebit("xla"),
            "xla",
            sizes.workers,
        ),
    ]


def parameters(sizes: Sizes) -> Any:
    """The shapes of the parameters, the model's layers as one loop."""
    if sizes.leaves is None:
        return abstract_params(replace(MODELS[sizes.model], scan=True))
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes.leaves]


@jax.custom_vjp
def _loss(params: Any, gradients: Any) -> jax.Array:
    """Zero, and yet of the given gradients, which are one worker's of a batch."""
    del params, gradients
    return jnp.float32(0)


def _forward(params: Any, gradients: Any) -> tuple[jax.Array, Any]:
    return _loss(params, gradients), gradients


def _backward(gradients: Any, cotangent: jax.Array) -> tuple[Any, None]:
    return jax.tree.map(lambda g: cotangent * g[0], gradients), None


_loss.defvjp(_forward, _backward)


def step_of(case: Case, mesh: Mesh, state: Any) -> Any:
    """The step of a case, to be compiled.

    Args:
      case: The case.
      mesh: The one device.
      state: The optimizer's state, or its shapes.

    Returns:
      From parameters, state and gradients to new parameters and state; the old ones are
      donated. Gradients have an axis of workers before their own.
    """
    stage = COMPRESSED if case.implementation else {}
    if case.workers:
        run = onebit_jax.simulated(_loss, case.tx, case.workers, axis=AXIS)
        return jax.jit(
            lambda *arguments: run.step(*arguments, **stage)[:2], donate_argnums=(0, 1)
        )

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        own = jax.tree.map(lambda g: g[0], gradients)
        updates, state = case.tx.update(own, state, params, **stage)
        return optax.apply_updates(params, updates), state

    if not case.implementation:
        return jax.jit(step, donate_argnums=(0, 1))
    everywhere, specs = PartitionSpec(), onebit_jax.state_specs(state)
    over = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(everywhere, specs, PartitionSpec(AXIS)),
        out_specs=(everywhere, specs),
    )
    return jax.jit(over, donate_argnums=(0, 1))


def state_of(case: Case, params: Any, mesh: Mesh) -> Any:
    """The optimizer's state of parameters."""
    if not case.workers:
        return onebit_jax.init(case.tx, params, mesh)
    return onebit_jax.simulated(_loss, case.tx, case.workers, axis=AXIS).init(params)[1]


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part."""
    found, mesh = device(sizes), make_mesh(1)
    shapes = parameters(sizes)
    record.write(values=sum(x.size for x in jax.tree.leaves(shapes)))
    rows: list[dict[str, Any]] = []
    for case in cases(sizes):
        row = {
            "name": case.name,
            "implementation": case.implementation,
            "workers": case.workers or 1,
        }
        try:
            row |= _measure(case, mesh, shapes, found, sizes)
        # One that does not compile, or does not fit, is told beside the others.
        except Exception as error:
            row["error"] = str(error).strip().split("\n")[0] or repr(error)
        rows.append(row)
        record.write(rows=rows)
        record.check()


def _measure(
    case: Case, mesh: Mesh, shapes: Any, found: Any, sizes: Sizes
) -> dict[str, Any]:
    params = _random(shapes, 0)
    gradients = _random(
        jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((case.workers or 1, *x.shape), x.dtype),
            shapes,
        ),
        1,
    )
    state = state_of(case, params, mesh)
    begun = time.perf_counter()
    arguments = params, state, gradients
    compiled = step_of(case, mesh, state).lower(*arguments).compile()
    compile_seconds = time.perf_counter() - begun
    del arguments
    before = (found.memory_stats() or {}).get("peak_bytes_in_use")
    carried = [params, state]
    del params, state

    def call() -> Any:
        carried[:] = compiled(*carried, gradients)
        return carried

    times = [
        seconds(call, jax.block_until_ready, sizes.calls)
        for _ in range(sizes.repeats + 1)
    ]
    finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(carried[0]))
    peak = (found.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "milliseconds": 1e3 * statistics.median(times[1:]),
        "compile_seconds": compile_seconds,
        "memory": needed_memory(compiled),
        # The peak is the process's: of this case where it has risen.
        "peak_bytes": peak if peak != before else None,
        "finite": finite,
    }


def _random(shapes: Any, seed: int) -> Any:
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = jax.jit(
        lambda keys: [
            0.02 * jax.random.normal(key, x.shape)
            for key, x in zip(keys, leaves, strict=True)
        ]
    )(keys)
    return jax.tree.unflatten(structure, made)
