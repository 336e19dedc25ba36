"""BERT's training step: its speed and memory, and the results of cuDNN's attention."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from benchmarks.bert.config import Config
from benchmarks.bert.measure import measure as measure_bert
from benchmarks.on_gpu.device import device
from models.attention import attend

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.on_gpu.record import Record
    from benchmarks.on_gpu.sizes import Sizes

HEADS, WIDTH = 16, 64
TIMES = 2.0
"""How many times XLA's error cuDNN's may be, in bfloat16."""


def bert_config(sizes: Sizes, lengths: tuple[int, ...], **values: Any) -> Config:
    """The flags of `benchmarks.bert` for whole steps of these lengths."""
    return Config(
        models=(sizes.model,),
        seqs=lengths,
        batch=sizes.batch,
        dtype=sizes.dtype,
        passes=("step",),
        **values,
    )


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part."""
    device(sizes, record.file.parent)
    if "cudnn" in sizes.attentions and sizes.platform == "gpu":
        try:
            record.write(attention=attention_errors(max(sizes.lengths)))
        # It has never run on a card. Times are measured even where it fails here.
        except Exception as error:
            record.write(attention={"error": str(error).strip().split("\n")[0]})
    record.check()
    steps: list[Any] = []
    for length in sizes.lengths:
        config = bert_config(
            sizes,
            (length,),
            attentions=sizes.attentions,
            peers=(),
            repeats=sizes.repeats,
        )
        (results,) = measure_bert(config)
        steps.append(dataclasses.asdict(results))
        record.write(steps=steps)
        record.check()


def attention_errors(length: int) -> dict[str, Any]:
    """Errors of attention and of its gradients, in bfloat16, beside float32.

    Args:
      length: Tokens of the sequences, of which the last third of one is padding.

    Returns:
      By implementation the norm of the difference over the norm, and whether cuDNN's
      are no more than `TIMES` XLA's.
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
    pairs = zip(errors["cudnn"], errors["xla"], strict=True)
    return {
        "of": ["output", "queries' gradient", "keys'", "values'"],
        "errors": errors,
        "right": all(a <= TIMES * b for a, b in pairs),
    }


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
