"""The optimizer's work on BERT's parameters: Adam's update beside the compressed stage.

Parameters, state and gradient are on one device, which is the one worker of a mesh, or
simulates several: the collectives are copies, and all arithmetic is done. A worker of n
averages a share 1 / n of the values; the one worker alone averages all of them.
"""

from __future__ import annotations

import functools
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

import onebit_jax
from benchmarks.on_gpu.device import device
from benchmarks.one_of_many import one_of_many
from benchmarks.timing import seconds
from models import SIZES as MODELS
from train.bert.objective import abstract_params
from train.core.mesh import AXIS, make_mesh
from train.plan.gpu_program import needed_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

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
      implementation: Name of what compresses; None where nothing is compressed.
      workers: Workers that the device simulates; None for the one of a mesh.
    """

    name: str
    tx: optax.GradientTransformation
    implementation: str | None = None
    workers: int | None = None


def cases(sizes: Sizes) -> list[Case]:
    """The optimizers, in the order in which they are measured.

    1-bit Adam by default and as published, by XLA and then by Mosaic: a kernel that
    hangs or breaks the device ends what is measured after it. Last, as published, of
    several workers.
    """

    def onebit(implementation: Any, **parts: Any) -> optax.GradientTransformation:
        exchange = one_of_many(AXIS, implementation=implementation)
        return onebit_jax.onebit_adam(
            LEARNING_RATE, exchange, onebit_jax.freeze_at(1), **parts
        )

    forms: dict[str, tuple[str, Mapping[str, Any]]] = {
        "default": ("1-bit Adam", {}),
        "published": ("1-bit Adam, as published", onebit_jax.AS_PUBLISHED),
    }
    by = {
        implementation: [
            Case(name, onebit(implementation, **parts), implementation)
            for name, parts in map(forms.__getitem__, sizes.forms)
        ]
        for implementation in ("xla", sizes.mosaic)
    }
    name, parts = forms["published"]
    several = f"{name}, {sizes.workers} workers on it"
    return [
        Case("Adam", optax.adam(LEARNING_RATE)),
        *by["xla"],
        *by[sizes.mosaic],
        Case(several, onebit("xla", **parts), "xla", sizes.workers),
    ]


def parameters(sizes: Sizes) -> Any:
    """The shapes of the parameters, the model's layers as one loop."""
    if sizes.leaves is None:
        return abstract_params(replace(MODELS[sizes.model], scan=True))
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes.leaves]


@jax.custom_vjp
def _loss(params: Any, gradients: Any) -> jax.Array:
    """Zero, whose gradients are the given ones: those of one worker, as a batch."""
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


def arguments_of(case: Case, mesh: Mesh, shapes: Any) -> tuple[Any, Any, Any]:
    """Shapes and places of what a step takes.

    Args:
      case: The case.
      mesh: The one device.
      shapes: Shapes of the parameters.

    Returns:
      Shapes and places of parameters, state and gradients.
    """

    def placed(tree: Any, *axes: str, before: tuple[int, ...] = ()) -> Any:
        sharding = jax.NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (*before, *x.shape), x.dtype, sharding=sharding
            ),
            tree,
        )

    params = placed(shapes)
    if case.workers:
        make = functools.partial(state_of, case, mesh=mesh)
        state = placed(jax.eval_shape(make, params))
        return params, state, placed(shapes, before=(case.workers,))
    state = onebit_jax.abstract_state(case.tx, params, mesh)
    return params, state, placed(shapes, AXIS, before=(1,))


class Built(NamedTuple):
    """A compiled step, and the places of its arguments."""

    step: jax.stages.Compiled
    arguments: tuple[Any, Any, Any]


def build(case: Case, mesh: Mesh, shapes: Any) -> Built:
    """Compiles the step of a case."""
    arguments = arguments_of(case, mesh, shapes)
    step = step_of(case, mesh, arguments[1]).lower(*arguments).compile()
    return Built(step, arguments)


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part, whose programs are compiled side by side."""
    found, mesh = device(sizes, record.file.parent), make_mesh(1)
    shapes = parameters(sizes)
    record.write(values=sum(x.size for x in jax.tree.leaves(shapes)))
    rows: list[dict[str, Any]] = []
    # That of several workers takes longest to compile: what it delays is not lost.
    for several in (False, True):
        wave = [case for case in cases(sizes) if bool(case.workers) == several]
        with ThreadPoolExecutor() as pool:
            builds = [pool.submit(build, case, mesh, shapes) for case in wave]
        for case, built in zip(wave, builds, strict=True):
            row = {
                "name": case.name,
                "implementation": case.implementation,
                "workers": case.workers or 1,
            }
            try:
                row |= _measure(case, built.result(), mesh, found, sizes)
            # One that does not compile, or does not fit, is told beside the others.
            except Exception as error:
                row["error"] = str(error).strip().split("\n")[0] or repr(error)
            rows.append(row)
            record.write(rows=rows)
            record.check()


def _measure(
    case: Case, built: Built, mesh: Mesh, found: Any, sizes: Sizes
) -> dict[str, Any]:
    places, places_of_state, places_of_gradients = built.arguments
    params, gradients = _random(places, 0), _random(places_of_gradients, 1)
    state = jax.tree.map(
        lambda x, place: jax.device_put(x, place.sharding),
        state_of(case, params, mesh),
        places_of_state,
    )
    before = (found.memory_stats() or {}).get("peak_bytes_in_use")
    carried = [params, state]
    del params, state

    def call() -> Any:
        carried[:] = built.step(*carried, gradients)
        return carried

    times = [
        seconds(call, jax.block_until_ready, sizes.calls)
        for _ in range(sizes.repeats + 1)
    ]
    peak = (found.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "milliseconds": 1e3 * statistics.median(times[1:]),
        "memory_bytes": needed_memory(built.step),
        # The peak is the process's: of this case where it has risen.
        "peak_bytes": peak if peak != before else None,
        "finite": bool(_all_finite(carried[0])),
    }


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def _random(shapes: Any, seed: int) -> Any:
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = jax.jit(
        lambda keys: [
            0.02 * jax.random.normal(key, x.shape)
            for key, x in zip(keys, leaves, strict=True)
        ],
        out_shardings=[x.sharding for x in leaves],
    )(keys)
    return jax.tree.unflatten(structure, made)
