"""Error and bytes of one compression, by block size.

The gradients of a small BERT, after some steps of Adam on its default text, are
compressed once with each block size.

    python -m benchmarks.kernels.block_size
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import onebit_jax
from benchmarks.page import table
from models import SIZES
from pallas_kernels import compress
from train.bert.config import PretrainConfig
from train.bert.data import load
from train.bert.objective import init_params, training_loss
from train.core.batches import element
from train.core.mesh import AXIS

STEPS = 100
BLOCK_SIZES = (*(2**k for k in range(5, 15)), None)


def gradients() -> list[jax.Array]:
    """The leaves of one worker's gradients after some steps."""
    with tempfile.TemporaryDirectory() as folder:
        data = load(PretrainConfig(), Path(folder))
    model = replace(SIZES["tiny"], vocab_size=len(data.vocabulary), dropout=0.0)
    mesh = jax.sharding.Mesh(jax.devices()[:1], AXIS)
    tx = optax.chain(onebit_jax.exact_mean(AXIS), optax.adam(1e-3))
    loss = training_loss(model, 0)
    run = onebit_jax.data_parallel(loss, tx, mesh)
    params, state = run.init(init_params(model, 0))
    for step in range(STEPS):
        batch = element(data.training, step)
        params, state, _ = run.step(params, state, batch, np.uint32(step))
    batch = element(data.training, STEPS)
    return jax.tree.leaves(jax.jit(jax.grad(loss))(params, batch, np.uint32(STEPS)))


def row_of(leaves: list[jax.Array], block_size: int | None) -> tuple[str, ...]:
    """The cells of a block size; None for one scale a leaf."""
    size = sum(x.size for x in leaves)
    total = sum(float(jnp.sum(x * x)) for x in leaves)
    error = bits = 0.0
    for x in leaves:
        whole = max(32, 1 << (x.size - 1).bit_length())
        words, scales, rest = compress(
            x.reshape(-1), jnp.zeros(x.size), block_size=block_size or whole
        )
        error += float(jnp.sum(rest * rest))
        # One scale a tensor needs no padding to a power of two.
        bits += 32 * (words.size + scales.size) if block_size else x.size + 32
    return (
        str(block_size or "the whole leaf"),
        f"{error / total:.3f}",
        f"{bits / size:.3f}",
        f"1/{32 * size / bits:.1f}",
    )


def main() -> None:
    """Prints a row a block size."""
    leaves = gradients()
    print(f"{sum(x.size for x in leaves):,} values in {len(leaves)} leaves")
    heads = "values a scale", "error ‖C[x] - x‖² / ‖x‖²", "bits a value", "of float32"
    print(table(heads, [row_of(leaves, size) for size in BLOCK_SIZES]))


if __name__ == "__main__":
    main()
