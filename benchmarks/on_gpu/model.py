"""BERT's training step: its speed and memory, and the results of cuDNN's attention.

The step is `train.pretrain`'s with Adam, of one worker, but for a loop over the layers:
dropout, both losses, clipping, skipping of steps that are not finite. FLOP are the
model's own (`train.plan.flops`); the peak that they are a share of is `facts`' matrix
product.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import onebit_jax
from benchmarks.on_gpu.part import read
from benchmarks.random_batch import random_batch
from benchmarks.timing import seconds
from models import SIZES as MODELS
from models.attention import attend
from train.bert.objective import init_params, training_loss
from train.core.mesh import AXIS, make_mesh
from train.core.optimizer import learning_rate_schedule, make_optimizer
from train.plan.compile import needed_memory
from train.plan.flops import step_flops

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

    from benchmarks.on_gpu.part import Record
    from benchmarks.on_gpu.sizes import Sizes
    from models import BertConfig
    from models.config import Attention

HEADS, WIDTH = 16, 64
TIMES = 2.0
"""How many times XLA's error cuDNN's may be, in bfloat16."""


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part."""
    record.device(sizes)
    if "cudnn" in sizes.attentions and sizes.platform == "gpu":
        try:
            record.write(attention=attention_errors(max(sizes.lengths)))
        # It has never run on a card. Times are measured even where it fails here.
        except Exception as error:
            record.write(attention=[{"error": str(error).strip().split("\n")[0]}])
    product = read(record.file.parent, "facts").get("product", {})
    rows: list[dict[str, Any]] = []
    for length in sizes.lengths:
        for attention in sizes.attentions:
            row = {"length": length, "batch": sizes.tokens // length}
            row |= {"attention": attention, "dtype": sizes.dtype, "model": sizes.model}
            try:
                row |= _step(sizes, length, attention, product.get("tflops_per_second"))
            # Not for these sizes, not on this device, or too large for it.
            except Exception as error:
                row["error"] = str(error).strip().split("\n")[0] or repr(error)
            rows.append(row)
            record.write(rows=rows)


def bert(sizes: Sizes, attention: Attention, length: int) -> BertConfig:
    """The model.

    Raises:
      ValueError: Its parts do not go together.
    """
    size = MODELS[sizes.model]
    return dataclasses.replace(
        size,
        max_positions=max(size.max_positions, length),
        dtype=sizes.dtype,
        attention=attention,
        scan=True,
    )


def training(model: BertConfig, mesh: Mesh) -> tuple[Any, Any]:
    """The optimizer of `train.pretrain --optimizer adam`, and the step with it."""
    tx = make_optimizer(
        "adam",
        learning_rate_schedule(4e-4, 0, 1000),
        onebit_jax.freeze_at(1),
        onebit_jax.sign_mean(AXIS),
        weight_decay=0.01,
        clip=1.0,
    )
    return tx, onebit_jax.data_parallel(training_loss(model, 0), tx, mesh)


def _step(
    sizes: Sizes, length: int, attention: Attention, peak: float | None
) -> dict[str, Any]:
    model, mesh = bert(sizes, attention, length), make_mesh(1)
    rows = sizes.tokens // length
    split = NamedSharding(mesh, PartitionSpec(AXIS))
    batch = jax.device_put(random_batch(model, rows, length), split)
    _, run = training(model, mesh)
    carried = [*run.init(init_params(model, 0))]
    arguments = batch, np.uint32(0)
    step = run.step.lower(*carried, *arguments).compile()

    def call() -> Any:
        carried[0], carried[1], loss = step(*carried, *arguments)
        return loss

    # The first call may tune.
    times = [
        seconds(call, jax.block_until_ready, sizes.calls)
        for _ in range(sizes.repeats + 1)
    ]
    taken = statistics.median(times[1:])
    rate = rows * step_flops(model, length) / taken / 1e12
    return {
        "milliseconds": 1e3 * taken,
        "examples_per_second": rows / taken,
        "tflops_per_second": rate,
        "of_peak": rate / peak if peak else None,
        "compiled_gb": needed_memory(step)["together"] / 1e9,
    }


def attention_errors(length: int) -> list[dict[str, Any]]:
    """Errors of attention and of its gradients, in bfloat16, beside float32.

    Args:
      length: Tokens of the sequences, of which the last third of one is padding.

    Returns:
      Of the output and each gradient, the norm of the difference over the norm by
      implementation, and whether cuDNN's is no more than `TIMES` XLA's.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (4, length, HEADS, WIDTH)
    values = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    lengths = jnp.array([length, length, length, 2 * length // 3], jnp.int32)
    with jax.default_matmul_precision("highest"):
        exact = results_of("xla")(*(x.astype(jnp.float32) for x in values), lengths)
    errors = {
        name: [
            float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))
            for a, b in zip(results_of(name)(*values, lengths), exact, strict=True)
        ]
        for name in ("xla", "cudnn")
    }
    of = "output", "queries' gradient", "keys'", "values'"
    return [
        {"error_of": name, "xla": xla, "cudnn": cudnn, "right": cudnn <= TIMES * xla}
        for name, xla, cudnn in zip(of, errors["xla"], errors["cudnn"], strict=True)
    ]


def results_of(implementation: Any) -> Callable[..., tuple[jax.Array, ...]]:
    """Attention and its gradients, in float32, as a program.

    Args:
      implementation: Name of the implementation of attention.

    Returns:
      From queries, keys, values, a cotangent and lengths to the output of the tokens
      that are there, and the three gradients.
    """

    def results(
        q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, ...]:
        there = jnp.arange(q.shape[1])[None] < lengths[:, None]

        def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            mixed = attend(q, k, v, lengths, implementation=implementation)
            return jnp.where(there[..., None, None], mixed, jnp.zeros_like(mixed))

        output, backward = jax.vjp(attention, q, k, v)
        return tuple(x.astype(jnp.float32) for x in (output, *backward(g)))

    return jax.jit(results)
