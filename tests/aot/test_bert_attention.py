"""BERT's attention by cuDNN, compiled for workers on H200s on a machine without any.

XLA leaves the kernels to the machine that runs them, so that jax's question for
cuDNN's version is all that is answered for it here; what they hold while they run is
not in the memory.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models import SIZES, Encoder
from train.plan.targets import GPUS

if "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ:
    pytest.skip("run by make test-aot", allow_module_level=True)

BATCH, LENGTH = 8, 512
LARGE = dataclasses.replace(SIZES["large"], num_layers=2, dtype="bfloat16", scan=True)


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    module = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{module}.check_cudnn_version", lambda: 91_000)


def compiled(config):
    """The gradients of an encoder on two workers."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=GPUS["h200"].target, topology="1x1x2"
    )
    mesh = topologies.make_mesh(topology, (2,), ("data",))
    graph, state = nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))

    @jax.grad
    def gradient(state, tokens, lengths):
        hidden = nnx.merge(graph, state).encode(tokens, tokens, lengths)
        return jnp.sum(hidden.astype(jnp.float32))

    def shaped(x, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    specs = P(), P("data"), P("data")
    step = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=P())
    arguments = (
        jax.tree.map(lambda x: shaped(x, P()), state),
        shaped(jax.ShapeDtypeStruct((2 * BATCH, LENGTH), jnp.int32), P("data")),
        shaped(jax.ShapeDtypeStruct((2 * BATCH,), jnp.int32), P("data")),
    )
    traced = jax.jit(step).trace(*arguments)
    # jax's own lowering mixes bfloat16 and float32.
    with jax.numpy_dtype_promotion("standard"):
        return traced.lower(lowering_platforms=("cuda",)).compile()


def kernels(program, name):
    return program.as_text().count(f'custom_call_target="{name}"')


def test_cudnn_holds_no_probabilities():
    by_cudnn, by_xla = (
        compiled(dataclasses.replace(LARGE, attention=attention))
        for attention in ("cudnn", "xla")
    )
    assert kernels(by_cudnn, "__cudnn$fmhaSoftmax") == 1
    assert kernels(by_cudnn, "__cudnn$fmhaSoftmaxBackward") == 1
    assert "cudnn$fmha" not in by_xla.as_text()
    held, more = (x.memory_analysis().temp_size_in_bytes for x in (by_cudnn, by_xla))
    print(held, more)
    probabilities = 2 * BATCH * LARGE.num_heads * LENGTH**2
    assert more - held > LARGE.num_layers * probabilities
