"""Bytes sent and memory of every exchange and optimizer, from their shapes alone.

    python -m benchmarks.costs --page docs/costs.md

Nothing is measured: what is sent is `wire_cost` of the exchanges and `stage_costs` of
the optimizers, what is held are the shapes of their states, for one float32 matrix.
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
    from collections.abc import Mapping

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
    four_bits = onebit_jax.quantized_mean("data", 4)
    onebit_adam = functools.partial(onebit_jax.scale_by_onebit_adam, signs, FREEZE)
    return {
        "1-bit Adam": onebit_adam(),
        "1-bit Adam as published": onebit_adam(**onebit_jax.AS_PUBLISHED),
        "1-bit Adam, 4 bits in the warm-up": onebit_adam(warmup_exchange=four_bits),
        "1-bit LAMB": onebit_jax.onebit_lamb(1.0, signs, FREEZE),
        "0/1 Adam": onebit_jax.zero_one_adam(1.0, signs, FREEZE),
        "BinSGDM": onebit_jax.binsgdm(1.0, onebit_jax.random_vote_mean("data")),
        "Distributed Lion": onebit_jax.distributed_lion(
            1.0, onebit_jax.vote_mean("data")
        ),
    }


def bits(transfers: tuple[onebit_jax.Transfer, ...], sizes: Mapping[str, int]) -> str:
    """Bits that a worker sends for a parameter, as a cell."""
    sent = onebit_jax.sent_bytes(transfers, sizes)
    return f"{8 * sent / _size():.2f}"


def held(tx: Any, workers: int) -> str:
    """Bytes of a state for a parameter on a worker's device, as a cell."""
    mesh = AbstractMesh((workers,), ("data",), (AxisType.Auto,))
    return f"{state_bytes(tx, PARAMS, mesh) / _size():.2f}"


def _size() -> int:
    return sum(math.prod(leaf.shape) for leaf in PARAMS.values())


def tables() -> str:
    """Both tables, as Markdown."""
    bits_sent = [f"bits, {n} workers" for n in WORKERS]
    bytes_held = [f"bytes, {n} workers" for n in WORKERS]
    rows = []
    for name, make in EXCHANGES.items():
        exchange = make("data")
        sent = [
            bits(exchange.wire_cost(PARAMS, {"data": n}), {"data": n}) for n in WORKERS
        ]
        rows.append([name, *sent, *(held(exchange, n) for n in WORKERS)])
    exchanges = table(["exchange", *bits_sent, *bytes_held], rows)
    rows = []
    for name, tx in optimizers().items():
        memory = [held(tx, n) for n in WORKERS]
        costs = [onebit_jax.stage_costs(tx, PARAMS, {"data": n}) for n in WORKERS]
        for stage in costs[0]:
            sent = [
                bits(c[stage], {"data": n}) for c, n in zip(costs, WORKERS, strict=True)
            ]
            rows.append([name, stage, *sent, *memory])
            name, memory = "", [""] * len(WORKERS)
    heads = ["optimizer", "stage", *bits_sent, *bytes_held]
    return f"{exchanges}\n\n{table(heads, rows)}"


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
