"""Bytes sent and memory of every exchange and optimizer, from their shapes alone.

    python -m benchmarks.costs --page docs/costs.md

Nothing is measured: what is sent is `stage_costs` of exchanges and optimizers, what is
held are the shapes of their states, for one float32 matrix.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import AbstractMesh, AxisType

import onebit_jax
from benchmarks.page import fill, table
from train.plan.family import state_bytes

if TYPE_CHECKING:
    import optax

MARK = "costs"
"""The part of a page that the tables go to."""
PARAMS = {"kernel": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
WORKERS = 2, 8, 64
FREEZE = onebit_jax.freeze_at(1000)

EXCHANGES = {
    "exact_mean": onebit_jax.exact_mean,
    "sign_mean": onebit_jax.sign_mean,
    "sign_mean, blocks of 128": functools.partial(onebit_jax.sign_mean, block_size=128),
    "sign_mean, errors in bfloat16": functools.partial(
        onebit_jax.sign_mean, error_dtype="bfloat16"
    ),
    "count_mean": onebit_jax.count_mean,
    **{
        f"quantized_mean, {bits} bits": functools.partial(
            onebit_jax.quantized_mean, bits=bits
        )
        for bits in (2, 4, 8)
    },
    "vote_mean": onebit_jax.vote_mean,
    "vote_mean, mean back": functools.partial(onebit_jax.vote_mean, back="mean"),
    "random_vote_mean": onebit_jax.random_vote_mean,
    "random_vote_mean, vote back": functools.partial(
        onebit_jax.random_vote_mean, back="vote"
    ),
}
"""The exchanges and their options, by the words for them; functions of an axis."""


def optimizers() -> dict[str, optax.GradientTransformation]:
    """The optimizers and the options that cost something, over the axis `data`."""
    signs = onebit_jax.sign_mean("data")
    four_bits, eight_bits = (onebit_jax.quantized_mean("data", n) for n in (4, 8))
    onebit_adam = functools.partial(onebit_jax.scale_by_onebit_adam, signs, FREEZE)
    published = onebit_jax.Compressed.published()
    return {
        "1-bit Adam": onebit_adam(),
        "1-bit Adam as published": onebit_adam(compressed=published),
        "1-bit Adam, 8 bits in the warm-up": onebit_adam(warmup_exchange=eight_bits),
        "1-bit Adam, 4 bits in the warm-up": onebit_adam(warmup_exchange=four_bits),
        "1-bit LAMB": onebit_jax.onebit_lamb(1.0, signs, FREEZE),
        "0/1 Adam": onebit_jax.zero_one_adam(1.0, signs, FREEZE),
        "BinSGDM": onebit_jax.binsgdm(1.0, onebit_jax.random_vote_mean("data")),
        "Distributed Lion": onebit_jax.distributed_lion(
            1.0, onebit_jax.vote_mean("data")
        ),
    }


def tables() -> str:
    """Both tables, as Markdown."""
    bits_sent = [f"bits, {n} workers" for n in WORKERS]
    bytes_held = [f"bytes, {n} workers" for n in WORKERS]
    exchanges = [
        row[:1] + row[2:]
        for name, make in EXCHANGES.items()
        for row in _rows(name, make("data"))
    ]
    stages = [row for name, tx in optimizers().items() for row in _rows(name, tx)]
    heads = ["exchange", *bits_sent, *bytes_held]
    more = ["optimizer", "stage", *bits_sent, *bytes_held]
    return f"{table(heads, exchanges)}\n\n{table(more, stages)}"


def _rows(name: str, tx: Any) -> list[list[str]]:
    """A row a stage, the first with the name and with the bytes that are held."""
    meshes = [AbstractMesh((n,), ("data",), (AxisType.Auto,)) for n in WORKERS]
    size = sum(math.prod(leaf.shape) for leaf in PARAMS.values())
    costs = [onebit_jax.stage_costs(tx, PARAMS, mesh.shape) for mesh in meshes]
    held = [f"{state_bytes(tx, PARAMS, mesh) / size:.2f}" for mesh in meshes]
    rows = []
    for stage in costs[0]:
        sent = [
            onebit_jax.sent_bytes(of_mesh[stage], mesh.shape)
            for of_mesh, mesh in zip(costs, meshes, strict=True)
        ]
        rows.append([name, stage, *(f"{8 * n / size:.2f}" for n in sent), *held])
        name, held = "", [""] * len(held)
    return rows


def main(page: Path | None = None) -> None:
    """Prints the tables.

    Args:
      page: The page whose marks they go between.
    """
    lines = tables()
    print(lines)
    if page is not None:
        page.write_text(fill(page.read_text("utf-8"), MARK, lines), "utf-8")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmarks.costs")
