"""The kernels compiled to an H200's machine code, on a machine without any GPU.

`make test-aot` installs the compiler and sets its environment. This proves that they
compile, what memory they take and how they lie in the program; neither their speed
nor their results on a card.
"""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import onebit_jax
import pallas_kernels as pk
from train.plan.compile import make_mesh

if "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ:
    pytest.skip("run by make test-aot", allow_module_level=True)

SIZE = 1 << 20
REGISTERS_OF_A_LANE = 255


def gpus(number):
    return make_mesh("h200", {"data": number})


def shaped(mesh, shape, dtype=jnp.float32, spec=None):
    spec = PartitionSpec() if spec is None else spec
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def compiled(function, *arguments, **options):
    traced = jax.jit(function, **options).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).compile()


def calls(program, operation):
    entry = program.as_text().partition("ENTRY")[2]
    return len(re.findall(rf"\b{operation}\(", entry))


def assembled(capfd):
    """Registers of each kernel, as the assembler told, and its PTX."""
    output = "".join(capfd.readouterr())
    assert re.search(r"0 bytes spill stores, 0 bytes spill loads", output)
    assert not re.search(r"[1-9]\d* bytes spill", output)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", output)]
    print("registers", registers)
    assert registers
    assert max(registers) < REGISTERS_OF_A_LANE
    return output


def is_one_kernel(program, aliased):
    assert calls(program, "custom-call") == 1
    assert "mosaic_gpu_v2" in program.as_text()
    for other in ("fusion", "copy", "concatenate"):
        assert not calls(program, other)
    assert ("output_to_operand_aliasing" in program.as_text()) == aliased
    # Nothing of the buffers' size is held beside them.
    return program.memory_analysis().temp_size_in_bytes < 10_000


@pytest.mark.parametrize("block_size", [32, 128, 1024, 4096, 32768])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_compress_is_one_kernel_in_place(capfd, block_size, dtype):
    mesh = gpus(1)
    low, full = (shaped(mesh, (SIZE,), d) for d in (dtype, jnp.float32))

    def compress(value, error, momentum):
        return pk.compress(
            value,
            error,
            block_size=block_size,
            momentum=momentum,
            decay=0.9,
            implementation="mosaic",
        )

    program = compiled(compress, low, low, full, donate_argnums=1)
    assert is_one_kernel(program, aliased=True)
    ptx = assembled(capfd)
    width = "b32" if dtype == jnp.float32 else "b16"
    # A row is one access of neighbouring lanes: three read, one written, 32 times.
    if block_size in (1024, 4096):
        assert ptx.count(f"ld.global.{width}") >= (96 if width == "b32" else 64)
        assert ptx.count(f"st.global.{width}") >= 32
        assert "ld.local" not in ptx
        assert "st.local" not in ptx


@pytest.mark.parametrize(("workers", "block_size"), [(2, 1024), (64, 1024), (8, 8192)])
def test_average_is_one_kernel_in_place(capfd, workers, block_size):
    mesh, blocks = gpus(1), SIZE // block_size

    def average(words, scales, error, counts):
        return pk.average_and_recompress(
            words, scales, error, counts, implementation="mosaic"
        )

    program = compiled(
        average,
        shaped(mesh, (workers, blocks, block_size // 32), jnp.uint32),
        shaped(mesh, (workers, blocks)),
        shaped(mesh, (SIZE,)),
        shaped(mesh, (blocks,), jnp.int32),
        donate_argnums=2,
    )
    assert is_one_kernel(program, aliased=True)
    assembled(capfd)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_decompress_is_one_kernel(capfd, dtype):
    mesh = gpus(1)
    program = compiled(
        lambda words, scales: pk.decompress(
            words, scales, SIZE, dtype, implementation="mosaic"
        ),
        shaped(mesh, (SIZE // 1024, 32), jnp.uint32),
        shaped(mesh, (SIZE // 1024,)),
    )
    assert is_one_kernel(program, aliased=False)
    assembled(capfd)


def test_xla_compresses_in_four_kernels_in_place():
    """Sums by rows, as on a CPU, would be a fifth."""
    buffer = shaped(gpus(1), (SIZE,))

    def compress(value, error, momentum):
        return pk.compress(value, error, block_size=1024, momentum=momentum, decay=0.9)

    program = compiled(compress, buffer, buffer, buffer, donate_argnums=1)
    assert calls(program, "fusion") == 4
    assert program.memory_analysis().temp_size_in_bytes < 10_000


def test_xla_decompresses_and_applies_in_one_kernel():
    """Why decompression needs no kernel of its own."""
    mesh = gpus(1)

    def apply(words, scales, variance):
        momentum = pk.decompress(words, scales, SIZE)
        return momentum, momentum / (jnp.sqrt(variance) + 1e-8)

    program = compiled(
        apply,
        shaped(mesh, (SIZE // 1024, 32), jnp.uint32),
        shaped(mesh, (SIZE // 1024,)),
        shaped(mesh, (SIZE,)),
    )
    assert calls(program, "fusion") == 1
    assert not calls(program, "custom-call")


@pytest.mark.parametrize("extra", [1024, 24], ids=["whole blocks", "any size"])
def test_what_fills_no_tile_is_left_to_xla(extra):
    mesh = gpus(1)
    buffer = shaped(mesh, (SIZE + extra,))

    def compress(value, error):
        return pk.compress(value, error, block_size=1024, implementation="mosaic")

    program = compiled(compress, buffer, buffer, donate_argnums=1)
    assert program.as_text().count('custom_call_target="mosaic_gpu_v2"') == 1
    held = program.memory_analysis().temp_size_in_bytes
    if extra == 1024:
        assert held < SIZE, "no copy of the buffer"


def test_the_optimizer_with_the_kernels():
    mesh = gpus(8)
    exchange = onebit_jax.sign_mean("data", implementation="mosaic")
    tx = onebit_jax.onebit_adam(1e-3, exchange, onebit_jax.freeze_at(5))
    run = onebit_jax.data_parallel(
        lambda p, x: jnp.mean(jnp.square(x @ p["w"] + p["b"][None])), tx, mesh
    )
    params = {"w": shaped(mesh, (512, 512)), "b": shaped(mesh, (512,))}
    state = onebit_jax.abstract_state(tx, params, mesh)
    batch = shaped(mesh, (64, 512), spec=PartitionSpec("data"))
    traced = run.step.trace(params, state, batch, stage="compressed")
    program = traced.lower(lowering_platforms=("cuda",)).compile()
    # The last kernel reads the momentum before for the lead, and writes the new in its
    # place.
    assert not re.search(r"f32\[512,512\]\S* copy\(", program.as_text())
    kernels = program.as_text().count('custom_call_target="mosaic_gpu_v2"')
    # The large leaf, and the server's share; the small leaf fills no tile, and XLA
    # decompresses.
    assert kernels == 2
    values = 512 * 512 + 512
    sent = onebit_jax.traffic(program, mesh).sent_bytes("compressed")
    assert sent < values * 4 / 15, np.round(values * 8 / sent, 1)
