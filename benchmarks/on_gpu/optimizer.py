"""The optimizer's work on BERT's parameters: Adam's step beside 1-bit Adam's."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import onebit_jax
from benchmarks.one_of_many import one_of_many
from benchmarks.timing import seconds
from benchmarks.whole_step import repeated, traced
from models import SIZES as MODELS
from train.bert.objective import abstract_params
from train.core.mesh import AXIS, make_mesh
from train.plan.compile import needed_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax.sharding import Mesh

    from benchmarks.on_gpu.part import Record
    from benchmarks.on_gpu.sizes import Sizes

LEARNING_RATE = 1e-3
FORMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "default": ("1-bit Adam", {}),
    "published": (
        "1-bit Adam, as published",
        {"compressed": onebit_jax.Compressed.published()},
    ),
}
"""From the name of a form to its words, and the options that make it."""


class Case(NamedTuple):
    """An optimizer's step.

    Attributes:
      name: Its name.
      tx: The optimizer.
      implementation: Name of what compresses; None where nothing is compressed.
    """

    name: str
    tx: optax.GradientTransformation
    implementation: str | None = None


def cases(sizes: Sizes) -> list[Case]:
    """The optimizers, in the order in which they are measured.

    By XLA and then by Mosaic: a kernel that hangs or breaks the device ends what is
    measured after it.
    """
    found = [Case("Adam", optax.adam(LEARNING_RATE))]
    for implementation in ("xla", sizes.mosaic):
        for name, parts in map(FORMS.__getitem__, sizes.forms):
            tx = onebit_jax.onebit_adam(
                LEARNING_RATE,
                one_of_many(AXIS, implementation=implementation),
                onebit_jax.freeze_at(1),
                **parts,
            )
            found.append(Case(name, tx, implementation))
    return found


def parameters(sizes: Sizes) -> Any:
    """The shapes of the parameters, the model's layers as one loop."""
    if sizes.leaves is None:
        return abstract_params(replace(MODELS[sizes.model], scan=True))
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes.leaves]


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part, whose programs are compiled side by side."""
    found, mesh = record.device(sizes), make_mesh(1)
    shapes, every = parameters(sizes), cases(sizes)
    record.write(values=sum(x.size for x in jax.tree.leaves(shapes)))

    def build(case: Case) -> jax.stages.Compiled:
        compressed = case.implementation is not None
        return traced(case.tx, mesh, shapes, compressed=compressed).lower().compile()

    with ThreadPoolExecutor() as pool:
        builds = [pool.submit(build, case) for case in every]
    rows: list[dict[str, Any]] = []
    for case, built in zip(every, builds, strict=True):
        row = {"name": case.name, "implementation": case.implementation}
        try:
            row |= _measure(case, built.result(), mesh, shapes, found, sizes)
            if adam := rows and rows[0].get("milliseconds"):
                row["of_adams"] = row["milliseconds"] / adam
        # One that does not compile, or does not fit, is told beside the others.
        except Exception as error:
            row["error"] = str(error).strip().split("\n")[0] or repr(error)
        rows.append(row)
        record.write(rows=rows)


def _measure(
    case: Case,
    step: jax.stages.Compiled,
    mesh: Mesh,
    shapes: Any,
    found: Any,
    sizes: Sizes,
) -> dict[str, Any]:
    before = (found.memory_stats() or {}).get("peak_bytes_in_use")
    call = repeated(step, case.tx, mesh, _random(shapes, 0), _random(shapes, 1))
    times = [
        seconds(call, jax.block_until_ready, sizes.calls)
        for _ in range(sizes.repeats + 1)
    ]
    peak = (found.memory_stats() or {}).get("peak_bytes_in_use")
    memory = needed_memory(step)
    return {
        "milliseconds": 1e3 * statistics.median(times[1:]),
        "argument_gb": memory["arguments"] / 1e9,
        "compiled_gb": memory["together"] / 1e9,
        # The peak is the process's: of this case where it has risen.
        "peak_gb": peak / 1e9 if peak and peak != before else None,
        "finite": all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(call()[0])),
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
