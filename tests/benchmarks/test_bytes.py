"""What a compressed step sends, beside Adam's, from the compiled programs."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from virtual_workers import mesh_of

import onebit_jax
from models import SIZES
from models.config import BertConfig


def bert_shapes(config: BertConfig):
    """Leaves of a BERT encoder: large matrices among many small vectors."""
    h, f = config.hidden_size, config.intermediate_size
    layer = {
        "qkv": (h, 3 * h),
        "qkv_bias": (3 * h,),
        "out": (h, h),
        "out_bias": (h,),
        "norm": (2, h),
        "up": (h, f),
        "up_bias": (f,),
        "down": (f, h),
        "down_bias": (h,),
        "norm_2": (2, h),
    }
    shapes = {
        "word": (config.vocab_size, h),
        "position": (config.max_positions, h),
        "layers": [layer] * config.num_layers,
    }
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=is_shape
    )


def compiled_step(tx, params, mesh):
    def loss(params, batch):
        # Gradients that XLA cannot find to be one another's copies.
        squares = (jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        return sum(squares, start=jnp.float32(0)) * jnp.mean(batch)

    step = onebit_jax.data_parallel(loss, tx, mesh).step
    state = onebit_jax.abstract_state(tx, params, mesh)
    batch = jax.ShapeDtypeStruct((mesh.size, 1), jnp.float32)
    return step.lower(params, state, batch).compile()


@pytest.mark.parametrize(
    ("workers", "layers"),
    [(4, 1), *(pytest.param(n, 4, marks=pytest.mark.slow) for n in (2, 4, 8))],
)
def test_the_compressed_step_sends_a_thirtieth(workers, layers):
    config = dataclasses.replace(SIZES["mini"], num_layers=layers)
    params, mesh = bert_shapes(config), mesh_of(workers)
    size = sum(p.size for p in jax.tree.leaves(params))
    assert 8e6 < size < 1.2e7
    with jax.numpy_dtype_promotion("standard"):
        adam = compiled_step(
            optax.chain(onebit_jax.exact_mean("data"), optax.adam(1e-3)), params, mesh
        )
    onebit = compiled_step(
        onebit_jax.onebit_adam(
            1e-3, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(10)
        ),
        params,
        mesh,
    )
    adam_bytes = onebit_jax.traffic(adam, mesh).sent_bytes()
    traffic = onebit_jax.traffic(onebit, mesh)
    print(f"{workers} workers: Adam {adam_bytes:,} bytes\n{traffic}")
    # A ring all-reduce of float32, and the mean of the loss.
    ring = 2 * (workers - 1) / workers
    assert adam_bytes == pytest.approx(ring * 4 * (size + 1), rel=1e-6)
    # The power of gradients goes with them: of each leaf, of its rows and columns.
    shapes = [p.shape for p in jax.tree.leaves(params)]
    lines = sum(sum(s) for s in shapes if len(s) == 2 and min(s) >= 16)
    powers = ring * 4 * (len(shapes) + lines)
    assert traffic.sent_bytes("warmup") == pytest.approx(adam_bytes + powers, abs=2)
    assert traffic.sent_bytes("compressed") <= adam_bytes / 30
    # Two collectives move the signs and scales of the whole tree, one the powers.
    compressed = [c for c in traffic.collectives if c.stage == "compressed"]
    there = "all-gather" if workers == 2 else "all-to-all"
    assert sorted(c.op for c in compressed) == sorted(
        [there, "all-reduce", "all-gather"]
    )
