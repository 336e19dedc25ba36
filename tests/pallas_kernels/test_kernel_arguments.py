"""Arguments of the three operations: what is refused, and what is chosen."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from virtual_workers import mesh_of

import pallas_kernels as pk
from onebit_jax import sign_mean
from pallas_kernels import _choose, _reference


def test_arguments_that_would_be_wrong_in_silence():
    one = jnp.ones(96)
    with pytest.raises(ValueError, match="power of two"):
        pk.compress(one, one, block_size=96)
    with pytest.raises(ValueError, match="'rms' or 'mean_abs'"):
        pk.compress(one, one, block_size=32, scale="RMS")
    for lacking in ({"momentum": one}, {"decay": 0.9}):
        with pytest.raises(ValueError, match="together"):
            pk.compress(one, one, block_size=32, **lacking)
    with pytest.raises(ValueError, match=r"from 0 to 32, .* got 33"):
        pk.decompress(jnp.ones((1, 1), jnp.uint32), jnp.ones(1), 33)
    with pytest.raises(ValueError, match=r"from 0 to 32, .* got -1"):
        pk.decompress(jnp.ones((1, 1), jnp.uint32), jnp.ones(1), -1)


def test_shapes_that_do_not_belong_together():
    one, words = jnp.ones(96), jnp.ones((2, 3, 1), jnp.uint32)
    compress = functools.partial(pk.compress, block_size=32)
    average = pk.average_and_recompress
    counts = jnp.ones(3, jnp.int32)
    scales = jnp.ones((2, 3))
    for call, message in (
        (lambda: compress(one.reshape(3, 32), one), r"value must be of shape \(96,\)"),
        (lambda: compress(one, one[:1]), r"error must be of shape \(96,\), got \(1,\)"),
        (
            lambda: compress(one, one, momentum=one[:1], decay=0.9),
            r"momentum must be of shape \(96,\)",
        ),
        (lambda: average(words, scales[:, :1], one, counts), "scales must be"),
        (lambda: average(words, scales, one[:32], counts), "error must be"),
        (lambda: average(words, scales, one, counts[:1]), "counts must be"),
        (lambda: pk.decompress(words[0], counts[:1], 96), "scales must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("width", [0, 3])
def test_words_of_no_block_that_can_be_compressed(width):
    words, scales = jnp.ones((2, 1, width), jnp.uint32), jnp.ones((2, 1))
    error, counts = jnp.ones(32 * width), jnp.full(1, 32 * width, jnp.int32)
    with pytest.raises(ValueError, match=f"power of two .* got {32 * width}"):
        pk.average_and_recompress(words, scales, error, counts)
    with pytest.raises(ValueError, match=f"power of two .* got {32 * width}"):
        pk.decompress(words[0], scales[0], 32 * width)


def test_the_largest_block():
    pk.check_block_size(2**24)
    one = jnp.ones(32)
    with pytest.raises(ValueError, match="at most 16777216, got 33554432"):
        pk.compress(one, one, block_size=2**25)


@pytest.mark.parametrize("size", [32_769, 65_535])
def test_a_buffer_that_does_not_fill_its_only_block(size):
    x = jax.random.normal(jax.random.key(size), (size,))
    words, scales, error = pk.compress(x, jnp.zeros(size), block_size=65_536)
    np.testing.assert_allclose(scales, [np.sqrt(np.mean(x**2))], rtol=1e-5)
    restored = pk.decompress(words, scales, size)
    np.testing.assert_array_equal(restored, np.where(x >= 0, scales, -scales))
    np.testing.assert_allclose(restored + error, x, rtol=1e-5, atol=1e-6)


def test_an_implementation_that_cannot_run_here():
    def run(implementation):
        return pk.compress(
            jnp.ones(8), jnp.ones(8), block_size=32, implementation=implementation
        )

    with pytest.raises(ValueError, match=r"'mosaic' needs an NVIDIA GPU.*for cpu"):
        run("mosaic")
    with pytest.raises(ValueError, match="None or one of xla, mosaic"):
        run("cuda")
    with pytest.raises(ValueError, match="None or one of xla, mosaic"):
        sign_mean("data", implementation="triton")
    over_workers = jax.shard_map(
        lambda x: pk.decompress(x, jnp.ones(1), 32, implementation="mosaic"),
        mesh=mesh_of(2),
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    with pytest.raises(ValueError, match="for cpu"):
        over_workers(jnp.ones((2, 1), jnp.uint32))


@pytest.mark.parametrize("capability", ["8.0", "gfx942"])
def test_a_gpu_that_is_no_hopper_is_refused_by_its_name(monkeypatch, capability):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gpu = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    with pytest.raises(ValueError, match=f"compute capability {capability}"):
        _choose.mosaic("mosaic", "compress", jnp.ones(8))


@pytest.mark.parametrize("capability", ["9.0", "10.0"])
def test_a_hopper_is_not(monkeypatch, capability):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gpu = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert _choose.mosaic("mosaic", "compress", jnp.ones(8)) is not None


def test_a_measurement_decides_the_default(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gpu = types.SimpleNamespace(compute_capability="9.0", device_kind="measured")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    x = jnp.ones(8)
    assert _choose.mosaic(None, "compress", x) is None
    monkeypatch.setattr(_choose, "_MOSAIC", {"measured": frozenset({"compress"})})
    assert _choose.mosaic(None, "compress", x) is not None
    assert _choose.mosaic(None, "decompress", x) is None
    assert _choose.mosaic("xla", "compress", x) is None
    gpu.device_kind = "another"
    assert _choose.mosaic(None, "compress", x) is None


def test_the_default_asks_for_no_device_while_nothing_is_measured(monkeypatch):
    x = jnp.ones(8)
    monkeypatch.setattr(jax, "devices", lambda: pytest.fail("asked for devices"))
    assert _choose.mosaic(None, "compress", x) is None


@pytest.mark.parametrize("size", [40_960, 40_000, 40_001, 39_936 + 512])
def test_whatever_is_decompressed_into_is_overwritten(size):
    """In chunks, then blocks, then a block that is cut short."""
    blocks = -(-size // 1024)
    words = np.random.default_rng(0).integers(0, 2**32, (blocks, 32), np.uint32)
    scales = np.arange(1, blocks + 1, dtype=np.float32)
    bits = (words[:, None] >> np.arange(32, dtype=np.uint32)[:, None]) & 1
    expected = (np.where(bits, 1, -1) * scales[:, None, None]).reshape(-1)[:size]
    got = jax.jit(lambda into: pk.decompress(words, scales, size, into=into))(
        jnp.full(size, jnp.nan)
    )
    np.testing.assert_array_equal(got, expected)


def test_a_buffer_to_decompress_into_must_fit():
    words, scales = jnp.ones((1, 1), jnp.uint32), jnp.ones(1)
    into = jnp.full(30, 7.0)
    agreed = pk.decompress(words, scales, 30, into=into)
    np.testing.assert_array_equal(agreed, pk.decompress(words, scales, 30))
    for wrong in (jnp.ones(29), jnp.ones(30, jnp.bfloat16)):
        with pytest.raises(ValueError, match="into must be of shape"):
            pk.decompress(words, scales, 30, into=wrong)


def test_a_shape_is_traced_once(monkeypatch):
    """A model asks once a leaf: by Python each time, BERT's take minutes."""
    traced, quantise = [], _reference.quantise

    def counted(x, *others):
        traced.append(x.shape)
        return quantise(x, *others)

    monkeypatch.setattr(_reference, "quantise", counted)
    buffers = jax.ShapeDtypeStruct((3, 7 * 32 + 5), jnp.float32)

    def of_leaves(xs):
        return [pk.compress(x, x, block_size=64)[1] for x in xs]

    jax.eval_shape(of_leaves, buffers)
    assert len(traced) == 1
