"""Every program of `benchmarks.on_gpu`, compiled for cards that are not there.

So that none of a card's minutes is lost to a program that does not compile. Programs
of minutes are compiled for one card alone, `-m ''` compiles them for the other too.
"""

import functools
import os
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
import pallas_kernels as pk
from benchmarks import whole_step
from benchmarks.kernels.inputs import DEFAULT, make_inputs
from benchmarks.kernels.operations import copy, operations
from benchmarks.on_gpu import model, optimizer
from benchmarks.on_gpu.sizes import BLOCK_SIZE, SIZES
from benchmarks.random_batch import random_batch
from train.bert.objective import abstract_params
from train.core.mesh import AXIS
from train.plan.compile import make_mesh, memory_on
from train.plan.targets import GPUS

if "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ:
    pytest.skip("run by make test-aot", allow_module_level=True)

CARDS = ["h100", "h200"]
ONE_CARD = ["h100", pytest.param("h200", marks=pytest.mark.slow)]
cards = pytest.mark.parametrize("card", CARDS)


@functools.cache
def mesh_of(card):
    return make_mesh(card, {AXIS: 1})


def placed(card, tree, *axes):
    sharding = NamedSharding(mesh_of(card), P(*axes))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def check(card, capfd, trace):
    """That it compiles, fits, and no kernel of ours spills."""
    # As the command runs: without the strictness of the tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        compiled = trace().lower(lowering_platforms=("cuda",)).compile()
    memory = memory_on(compiled, GPUS[card])
    print({name: f"{n / 1e9:.2f} GB" for name, n in memory.items()})
    assert memory["fits"]
    said = "".join(capfd.readouterr())
    assert not re.search(r"[1-9]\d* bytes spill", said)
    return compiled, said


def traced(function, *arguments):
    return functools.partial(function.trace, *arguments)


@cards
@pytest.mark.parametrize("block_size", [32, 64, 256, 1024, 4096, 8192, 32768])
@pytest.mark.parametrize("scale", ["rms", "mean_abs"])
def test_the_suite_of_the_kernels(capfd, card, block_size, scale):
    """All of a block size in one program: with and without momentum, both dtypes."""
    size = 4 * max(block_size, 4096)
    low, full = (
        placed(card, jax.ShapeDtypeStruct((size,), dtype))
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    blocks, how = size // block_size, {"scale": scale, "implementation": "mosaic"}

    def suite(low, full, words, scales, counts):
        compress = functools.partial(pk.compress, block_size=block_size, **how)
        made = [compress(a, b) for a in (low, full) for b in (low, full)]
        made.append(compress(full, full, momentum=full, decay=0.9))
        made.append(pk.average_and_recompress(words, scales, full, counts, **how))
        for dtype in (jnp.bfloat16, jnp.float32):
            made.append(
                pk.decompress(words[0], scales[0], size, dtype, implementation="mosaic")
            )
        return made

    words = jax.ShapeDtypeStruct((3, blocks, block_size // 32), jnp.uint32)
    scales = jax.ShapeDtypeStruct((3, blocks), jnp.float32)
    counts = jax.ShapeDtypeStruct((blocks,), jnp.int32)
    rest = placed(card, (words, scales, counts))
    compiled, said = check(card, capfd, traced(jax.jit(suite), low, full, *rest))
    # The other card's are the same kernels, which are not assembled again.
    assert card != CARDS[0] or "0 bytes spill stores" in said
    assert compiled.as_text().count('custom_call_target="mosaic_gpu_v2"') == 8


@cards
@pytest.mark.parametrize("size", SIZES.kernels)
def test_the_operations_that_are_timed(capfd, card, size):
    inputs = jax.eval_shape(lambda: make_inputs(size, BLOCK_SIZE))
    names = []
    for implementation in ("optax", "xla", SIZES.mosaic):
        for each in operations(inputs, BLOCK_SIZE, implementation):
            # The whole step is compiled below, on the parameters of BERT-Large.
            if each.name in SIZES.operations and each.name != DEFAULT:
                call = each.prepare()
                arguments = placed(card, call.arguments)
                check(card, capfd, traced(call.function, *arguments))
                names.append(each.name)
    assert {*names} == {*SIZES.operations} - {DEFAULT}


@cards
def test_the_bandwidth_and_the_peak(capfd, card):
    x = placed(card, jax.ShapeDtypeStruct((max(SIZES.kernels),), jnp.float32))
    call = copy(x)
    check(card, capfd, traced(call.function, *call.arguments))
    square = (SIZES.product,) * 2
    a = placed(card, jax.ShapeDtypeStruct(square, jnp.dtype(SIZES.dtype)))
    check(card, capfd, traced(jax.jit(jnp.matmul), a, a))


@pytest.mark.parametrize("card", ONE_CARD)
@pytest.mark.parametrize(
    "case", optimizer.cases(SIZES), ids=lambda x: f"{x.name}, {x.implementation}"
)
def test_the_optimizer_on_the_parameters_of_bert_large(capfd, card, case):
    shapes = optimizer.parameters(SIZES)
    compressed = case.implementation is not None
    trace = functools.partial(
        whole_step.traced, case.tx, mesh_of(card), shapes, compressed=compressed
    )
    compiled, _ = check(card, capfd, trace)
    assert ("mosaic_gpu_v2" in compiled.as_text()) == (case.implementation == "mosaic")


@pytest.fixture
def cudnn(monkeypatch):
    """jax's question for its version; XLA leaves the kernels to the card."""
    module = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{module}.check_cudnn_version", lambda: 91_000)


@pytest.mark.parametrize("card", ONE_CARD)
@pytest.mark.parametrize("attention", SIZES.attentions)
@pytest.mark.parametrize("length", SIZES.lengths)
@pytest.mark.usefixtures("cudnn")
def test_the_step_of_bert_large(capfd, card, attention, length):
    bert, mesh = model.bert(SIZES, attention, length), mesh_of(card)
    tx, run = model.training(bert, mesh)
    params = placed(card, abstract_params(bert))
    state = onebit_jax.abstract_state(tx, params, mesh)
    batch = placed(card, random_batch(bert, SIZES.tokens // length, length), AXIS)
    number = placed(card, jax.ShapeDtypeStruct((), jnp.uint32))
    trace = traced(run.step, params, state, batch, number)
    compiled, _ = check(card, capfd, trace)
    text, memory = compiled.as_text(), memory_on(compiled, GPUS[card])
    assert ("__cudnn$fmhaSoftmaxBackward" in text) == (attention == "cudnn")
    # Parameters and both moments, float32, updated in place.
    assert memory["arguments"] == pytest.approx(12 * 336e6, rel=0.01)
    assert memory["outputs"] < 1.001 * memory["in_place"]
    # By cuDNN no probabilities are held: those of all pairs of tokens take 13 GB.
    if attention == "cudnn":
        assert memory["together"] < 25e9


@cards
@pytest.mark.parametrize("attention", SIZES.attentions)
@pytest.mark.usefixtures("cudnn")
def test_the_results_of_attention(capfd, card, attention):
    shape = 4, max(SIZES.lengths), model.HEADS, model.WIDTH
    x = placed(card, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    lengths = placed(card, jax.ShapeDtypeStruct((4,), jnp.int32))
    check(card, capfd, traced(model.results_of(attention), x, x, x, x, lengths))
