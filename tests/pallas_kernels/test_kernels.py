"""Packing, and the three operations: every implementation against NumPy.

`pytest tests/pallas_kernels/test_kernels.py --implementation mosaic` is for a GPU.
"""

import functools
import itertools
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from virtual_workers import Workers, mesh_of

import pallas_kernels as pk
from benchmarks.one_of_many import one_of_many
from onebit_jax import Compressed, freeze_at, onebit_adam, sign_mean
from pallas_kernels import _packing, _reference

IMPLEMENTATIONS = ["xla", "mosaic_interpreted"]
ROUNDING = 3e-7
"""Of sums whose terms are normal numbers, some float32 steps of 1: a block of few
values that nearly cancel has a scale of no more than a few of these."""
# A tile and a part of one; blocks that share a tile, fill one, and fill several.
SHAPES = [(3, 64), (5000, 1024), (9000, 32), (8192, 4096), (20_000, 8192)]
MORE = [(9000, 256), (10_240, 1024)]
LARGE = [(1_000_003, 1024), (1_000_000, 32768), (65_536, 32)]


def slow(*arguments):
    return pytest.param(*arguments, marks=pytest.mark.slow)


def compressions():
    """All shapes with all options, each shape quickly with one of two in turn."""
    quick = [
        (*shape, *options)
        for shape, options in zip(
            SHAPES, itertools.cycle([("mean_abs", False), ("rms", True)]), strict=False
        )
    ]
    for shape in (*SHAPES, *MORE, *LARGE):
        for options in itertools.product(("mean_abs", "rms"), (False, True)):
            case = *shape, *options
            yield case if case in quick else slow(*case)


def pytest_generate_tests(metafunc):
    if "implementation" in metafunc.fixturenames:
        names = metafunc.config.getoption("implementation") or IMPLEMENTATIONS
        metafunc.parametrize("implementation", names)


def workers_here():
    """Two workers, or the one GPU that there is."""
    return mesh_of(min(2, jax.device_count()))


@functools.cache
def compiled(operation, **options):
    """An operation with these options as one program: much sooner than step by step."""
    return jax.jit(functools.partial(operation, **options))


@pytest.fixture
def rng():
    seed = secrets.randbits(32)
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.mark.parametrize("pack", [_packing.pack_by_rows, _packing.pack_by_halves])
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([1, 2, 8, 32]))
def test_packing_is_planar(pack, seed, blocks, width):
    x = np.random.default_rng(seed).normal(size=(blocks, 32, width)).astype(np.float32)
    x[np.abs(x) < 0.1] = 0
    words = np.asarray(compiled(pack)(jnp.asarray(x)))
    for bit in range(32):
        np.testing.assert_array_equal((words >> bit) & 1, x[:, bit, :] >= 0)
    np.testing.assert_array_equal(
        compiled(pk.unpack_signs)(words, np.full(blocks, 2.0, np.float32)),
        np.where(x >= 0, 2, -2),
    )


@pytest.mark.parametrize("pack", [pk.pack_signs, _packing.pack_by_halves])
def test_signs_of_the_numbers_that_have_none(pack):
    x = -jnp.ones((1, 32, 1))
    x = x.at[0, :3, 0].set(jnp.array([0.0, -0.0, jnp.nan]))
    assert int(pack(x)[0, 0]) == 0b0011


def blocks_of(x, block_size):
    """Blocks, each a row, and which of their values are not padding."""
    blocks = -(-x.size // block_size)
    padded = np.zeros(blocks * block_size)
    padded[: x.size] = x
    is_value = np.arange(padded.size) < x.size
    return padded.reshape(blocks, -1), is_value.reshape(blocks, -1)


def bits_of(words):
    bits = (
        np.asarray(words)[..., None, :] >> np.arange(32, dtype=np.uint32)[:, None]
    ) & 1
    return bits.reshape(*words.shape[:-1], -1)


def check(result, x, counted, scale, tolerance):
    """Words, scales and error of what should have been compressed, in float64."""
    words, scales, error = result
    counts = np.maximum(counted.sum(axis=1), 1)
    power = np.square(x) if scale == "rms" else np.abs(x)
    expected = power.sum(axis=1, where=counted) / counts
    expected = np.sqrt(expected) if scale == "rms" else expected
    np.testing.assert_allclose(scales, expected, rtol=2e-6, atol=ROUNDING)
    # A sum within rounding of zero may have either sign.
    certain = counted & (np.abs(x) > 1e-5)
    positive = bits_of(words) == 1
    np.testing.assert_array_equal(positive[certain], x[certain] >= 0)
    sent = np.where(positive, 1, -1) * np.asarray(scales, float)[:, None]
    kept = np.asarray(error.astype(jnp.float32), float)
    expected = (x - sent)[counted]
    np.testing.assert_allclose(kept, expected, rtol=0, atol=tolerance)
    assert kept.size == expected.size


@pytest.mark.parametrize(
    ("size", "block_size", "scale", "with_momentum"), list(compressions())
)
def test_compress(rng, implementation, size, block_size, scale, with_momentum):
    value, error, momentum = rng.normal(size=(3, size)).astype(np.float32)
    for buffer in (value, error, momentum):
        buffer[::7] *= 1e-20  # beside values of a normal size
    options = {"momentum": jnp.asarray(momentum), "decay": 0.9} if with_momentum else {}
    compress = compiled(
        pk.compress, block_size=block_size, scale=scale, implementation=implementation
    )
    result = compress(jnp.asarray(value), jnp.asarray(error), **options)
    x = value.astype(float)
    x = error + (0.1 * x + 0.9 * momentum if with_momentum else x)
    check(result, *blocks_of(x, block_size), scale, 4e-6)
    decompress = compiled(pk.decompress, size=size, implementation=implementation)
    restored = np.asarray(decompress(*result[:2]))
    np.testing.assert_allclose(restored + result[2], x, rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    ("size", "block_size"),
    [
        (10_000, 256),
        *(slow(40_000, block_size) for block_size in (32, 1024, 4096, 32768)),
    ],
)
@pytest.mark.parametrize(
    ("value_dtype", "error_dtype"),
    [
        slow(jnp.float32, jnp.float32),  # test_compress has them
        (jnp.float32, jnp.bfloat16),
        (jnp.bfloat16, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16),
    ],
)
def test_low_precision(rng, implementation, value_dtype, error_dtype, size, block_size):
    value = jnp.asarray(rng.normal(size=size), value_dtype)
    error = jnp.asarray(rng.normal(size=size), error_dtype)
    compress = compiled(
        pk.compress, block_size=block_size, implementation=implementation
    )
    result = compress(value, error)
    assert result[2].dtype == error_dtype
    x = np.asarray(value, float) + np.asarray(error, float)
    tolerance = 4e-6 if error_dtype == jnp.float32 else 2e-2
    check(result, *blocks_of(x, block_size), "rms", tolerance)
    decompress = compiled(
        pk.decompress, size=size, dtype=value_dtype, implementation=implementation
    )
    restored = decompress(*result[:2])
    assert restored.dtype == value_dtype


@pytest.mark.parametrize(
    ("size", "block_size"),
    [
        (5 * 4096, 1024),
        *(slow(*shape) for shape in ((9000, 256), (65_536, 32), (3 * 32768, 32768))),
    ],
)
def test_in_place(rng, implementation, size, block_size):
    value, error, momentum = rng.normal(size=(3, size)).astype(np.float32)
    compress = functools.partial(
        pk.compress, block_size=block_size, decay=0.9, implementation=implementation
    )
    residual = jnp.asarray(error)
    update = jax.jit(
        lambda error, value, momentum: compress(value, error, momentum=momentum),
        donate_argnums=0,
    )
    result = update(residual, jnp.asarray(value), jnp.asarray(momentum))
    assert residual.is_deleted()
    x = error.astype(float) + 0.1 * value.astype(float) + 0.9 * momentum
    check(result, *blocks_of(x, block_size), "rms", 4e-6)


@pytest.mark.parametrize(
    ("scale", "workers", "size", "block_size"),
    [
        ("rms", 1, 9000, 256),
        slow("mean_abs", 20, 9000, 256),
        *(("mean_abs", 3, *shape) for shape in SHAPES),
        *(slow("mean_abs", 3, *shape) for shape in MORE),
        slow("rms", 20, 20_000, 8192),
    ],
)
def test_average_and_recompress(rng, implementation, scale, workers, size, block_size):
    blocks = -(-size // block_size)
    words = rng.integers(0, 2**32, (workers, blocks, block_size // 32), dtype=np.uint32)
    scales = rng.random((workers, blocks)).astype(np.float32)
    error = rng.normal(size=blocks * block_size).astype(np.float32)
    counts = rng.integers(0, block_size + 1, blocks).astype(np.int32)
    counts[: blocks // 2] = block_size
    average = compiled(
        pk.average_and_recompress, scale=scale, implementation=implementation
    )
    result = average(*map(jnp.asarray, (words, scales, error, counts)))
    sent = np.where(bits_of(words) == 1, 1, -1) * scales.astype(float)[..., None]
    y = sent.mean(axis=0) + error.reshape(blocks, block_size)
    counted = np.arange(block_size) < counts[:, None]
    new_words, new_scales, new_error = result
    terms = y**2 if scale == "rms" else np.abs(y)
    mean = np.sum(terms, axis=1, where=counted) / np.maximum(counts, 1)
    expected = np.sqrt(mean) if scale == "rms" else mean
    np.testing.assert_allclose(new_scales, expected, rtol=2e-6, atol=ROUNDING)
    certain = counted & (np.abs(y) > 1e-5)
    np.testing.assert_array_equal((bits_of(new_words) == 1)[certain], y[certain] >= 0)
    magnitude = np.asarray(new_scales)[:, None]
    left = y - np.where(bits_of(new_words) == 1, magnitude, -magnitude)
    np.testing.assert_allclose(
        np.asarray(new_error).reshape(y.shape), np.where(counted, left, 0), atol=4e-6
    )


@pytest.mark.parametrize(
    ("workers", "scale", "dtype"),
    [
        (1, "rms", jnp.float32),
        (3, "mean_abs", jnp.bfloat16),
        slow(9, "rms", jnp.float32),
    ],
)
def test_a_large_average_is_by_chunks_in_place_on_a_cpu(rng, workers, scale, dtype):
    """As of all blocks at once, to the bit; those would take new memory."""
    if jax.default_backend() != "cpu":
        pytest.skip("other backends average all blocks at once")
    blocks, width = 70, 32  # four chunks, and six blocks one by one
    mesh = workers_here()
    words = rng.integers(0, 2**32, (2, workers, blocks, width), dtype=np.uint32)
    scales = rng.random((2, workers, blocks)).astype(np.float32)
    scales[:, 0, 20] = np.nan
    error = rng.normal(size=(2, blocks, 32, width)).astype(dtype)
    counts = rng.integers(0, 1025, (1, blocks)).astype(np.int32)
    inputs = [jnp.asarray(x[: mesh.size]) for x in (words, scales, error, counts)]

    def on_each(average):
        over_workers = jax.shard_map(
            lambda *shares: tuple(
                x[None] for x in average(*(x[0] for x in shares), scale=scale)
            ),
            mesh=mesh,
            in_specs=(*[PartitionSpec("data")] * 3, PartitionSpec()),
            out_specs=PartitionSpec("data"),
        )
        return jax.jit(over_workers, donate_argnums=2).lower(*inputs).compile()

    def flat(words, scales, error, counts, scale):
        result = pk.average_and_recompress(
            words, scales, error.reshape(-1), counts, scale=scale, implementation="xla"
        )
        return *result[:2], result[2].reshape(error.shape)

    by_chunks, whole = on_each(flat), on_each(_reference._average_whole)
    expected = jax.device_get(whole(*map(jnp.copy, inputs)))
    for got, of_all in zip(by_chunks(*inputs), expected, strict=True):
        if got.dtype == jnp.bfloat16:  # of which NumPy knows no NaN
            got, of_all = got.astype(jnp.float32), of_all.astype(np.float32)
        np.testing.assert_array_equal(got, of_all)
    # Half of the float32 values of all blocks.
    assert by_chunks.memory_analysis().temp_size_in_bytes < 2 * error[0].size


# Whole exchanges have the other's numbers that are hard.
@pytest.mark.parametrize("scale", ["rms", slow("mean_abs")])
def test_what_workers_sent_may_be_hard(implementation, scale):
    """NaN, infinity and zero in a block of their own; the others do not notice."""
    words = jnp.full((3, 16, 8), 2**32 - 1, jnp.uint32)
    sent = np.full((3, 16), 2, np.float32)
    sent[1, 2], sent[0, 3], sent[2, 4], sent[:, 5] = np.nan, np.inf, -np.inf, 0
    residual = np.zeros((16, 256), np.float32)
    residual[6, 100], residual[7, 200] = np.nan, np.inf
    average = compiled(
        pk.average_and_recompress, scale=scale, implementation=implementation
    )
    new_words, scales, error = average(
        words,
        jnp.asarray(sent),
        jnp.asarray(residual.reshape(-1)),
        jnp.full(16, 256, jnp.int32),
    )
    hard = [2, 3, 4, 6, 7]
    expected = np.full(16, 2.0)
    expected[5] = 0
    scales, error = np.asarray(scales), np.asarray(error).reshape(residual.shape)
    np.testing.assert_array_equal(np.flatnonzero(~np.isfinite(scales)), hard)
    assert not np.isfinite(error[hard]).any()
    easy = np.setdiff1d(np.arange(16), hard)
    np.testing.assert_allclose(scales[easy], expected[easy], rtol=2e-6)
    np.testing.assert_allclose(error[easy], 0, atol=4e-6)
    decompress = compiled(
        pk.decompress, size=residual.size, implementation=implementation
    )
    restored = np.asarray(decompress(new_words, scales)).reshape(residual.shape)
    np.testing.assert_array_equal(
        np.abs(restored), np.abs(scales)[:, None] + 0 * residual[0]
    )


def test_numbers_that_are_hard(implementation):
    """Each in a block of its own; the others do not notice."""
    tiny, huge = np.float32(1e-42), np.float32(1e25)
    hard = [0.0, -0.0, tiny, 1e-18, 1e18, huge, np.inf, -np.inf, np.nan]
    value = np.ones((16, 256), np.float32)
    value[: len(hard)] *= np.array(hard, np.float32)[:, None]
    compress = compiled(
        pk.compress, block_size=256, scale="rms", implementation=implementation
    )
    words, scales, error = compress(
        jnp.asarray(value.reshape(-1)), np.zeros(value.size, np.float32)
    )
    scales, error = np.asarray(scales), np.asarray(error).reshape(value.shape)
    bits = bits_of(words)
    np.testing.assert_array_equal(scales[:2], 0)
    assert bits[:2].all(), "zeros of either sign are positive"
    assert not error[:2].any()
    assert scales[2] in (0, tiny), "a square that is not normal may be zero"
    # As good as the square of 1e-18, which is near the smallest normal number.
    np.testing.assert_allclose(scales[3:5], hard[3:5], rtol=2e-6)
    left = error[3:5] + scales[3:5, None]
    np.testing.assert_allclose(left, value[3:5], rtol=2e-6)
    assert np.all(scales[5:8] == np.inf)
    assert not np.isfinite(error[5:9]).any()
    assert not bits[7:9].any(), "NaN is negative"
    assert np.isnan(scales[8])
    np.testing.assert_array_equal(scales[9:], 1)
    np.testing.assert_array_equal(error[9:], 0)


def test_a_buffer_of_nothing(implementation):
    words, scales, error = pk.compress(
        jnp.zeros(0), jnp.zeros(0), block_size=64, implementation=implementation
    )
    assert words.shape == (0, 2)
    assert scales.shape == error.shape == (0,)


@functools.cache
def trained(implementation):
    """Parameters after four steps, three of them compressed."""
    # Whole blocks that fill no tile at the end, and a leaf smaller than a tile.
    params = {"kernel": jnp.zeros((90, 128)), "bias": jnp.zeros(128)}
    mesh = workers_here()
    signs = sign_mean if mesh.size > 1 else one_of_many
    exchange = signs("data", block_size=256, implementation=implementation)
    tx = onebit_adam(0.1, exchange, freeze_at(1), compressed=Compressed.published())
    run = Workers(tx, params, mesh)
    steps = np.random.default_rng(1).normal(0.1, 1, size=(4, mesh.size, 91, 128))
    for g in steps.astype(np.float32):
        gradients = {"kernel": jnp.asarray(g[:, :90]), "bias": jnp.asarray(g[:, 90])}
        params = optax.apply_updates(params, run.update(gradients, params))
    return params


def test_the_optimizer_computes_the_same(implementation):
    """Compression is these operations alone, inside shard_map with checked types."""
    if implementation == "xla":
        pytest.skip("it is what the others are held to")
    both = jax.tree.leaves(trained("xla")), jax.tree.leaves(trained(implementation))
    for a, b in zip(*both, strict=True):
        apart = np.abs(np.asarray(a) - np.asarray(b))
        # Where a sum stands on zero, the signs may differ: not in one of a thousand.
        assert np.mean(~(apart <= 1e-4)) < 1e-3
        assert np.isfinite(b).all()
        assert np.abs(b).max() > 0.1


@pytest.mark.parametrize("size", [5 * 1024, slow(40_000)])
def test_types_of_which_only_some_vary(implementation, size):
    """A replicated error, or momentum, beside each worker's own values."""
    if implementation == "mosaic_interpreted":
        size = min(size, 9000)
    mesh = workers_here()

    def compress(value, momentum):
        _, scales, error = pk.compress(
            value[0],
            jnp.zeros(size),
            block_size=1024,
            momentum=momentum,
            decay=0.5,
            implementation=implementation,
        )
        return scales[None], error[None]

    over_workers = jax.shard_map(
        compress,
        mesh=mesh,
        in_specs=(PartitionSpec("data"), PartitionSpec()),
        out_specs=PartitionSpec("data"),
    )
    value = jnp.stack([jnp.ones(size), jnp.full(size, 3.0)])[: mesh.size]
    scales, error = jax.jit(over_workers)(value, jnp.ones(size))
    np.testing.assert_array_equal(scales[:, 0], [1.0, 2.0][: mesh.size])
    assert not np.asarray(error).any()


def test_averages_of_workers_that_differ(implementation):
    """Under checked types, with blocks that fill no tile at the end."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, 3, 5, 32), dtype=np.uint32)
    scales, error = rng.random((2, 3, 5)), rng.normal(size=(2, 5 * 1024))
    counts = np.full((2, 5), 1024, np.int32)
    counts[:, 4] = 7
    mesh = workers_here()
    inputs = [
        jnp.asarray(x[: mesh.size])
        for x in (words, scales.astype(np.float32), error.astype(np.float32), counts)
    ]

    def average(implementation):
        return lambda *shares: tuple(
            x[None]
            for x in pk.average_and_recompress(
                *(x[0] for x in shares), implementation=implementation
            )
        )

    over_workers = jax.shard_map(
        average(implementation),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    result = jax.jit(over_workers)(*inputs)
    for worker in range(mesh.size):
        alone = jax.jit(average("xla"))(*(x[worker : worker + 1] for x in inputs))
        np.testing.assert_array_equal(result[0][worker], alone[0][0])
        for got, expected in zip(result[1:], alone[1:], strict=True):
            np.testing.assert_allclose(got[worker], expected[0], rtol=0, atol=2e-6)


def test_a_decay_that_differs_from_worker_to_worker(implementation):
    size = 9000 if implementation == "mosaic_interpreted" else 40_000
    mesh = workers_here()

    def compress(decay, value):
        _, scales, _ = pk.compress(
            value[0],
            jnp.zeros(size),
            block_size=1024,
            momentum=jnp.zeros(size, jnp.bfloat16),
            decay=decay[0],
            implementation=implementation,
        )
        return scales[None]

    over_workers = jax.shard_map(
        compress,
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    decays = jnp.array([0.5, 0.75])[: mesh.size]
    scales = jax.jit(over_workers)(decays, jnp.ones((mesh.size, size)))
    np.testing.assert_allclose(scales[:, 0], 1 - decays, rtol=1e-6)


def test_float32_stays_float32_where_floats_are_wide():
    with jax.enable_x64(True):
        value = jnp.ones(40_000, jnp.float32)
        words, scales, error = pk.compress(
            value, value, block_size=1024, momentum=value, decay=jnp.float64(0.5)
        )
        counts = jnp.full(40, 1024, jnp.int32)
        again = pk.average_and_recompress(
            words[None], scales[None], jnp.ones(40_960, jnp.float32), counts
        )
    assert scales.dtype == error.dtype == jnp.float32
    assert again[1].dtype == again[2].dtype == jnp.float32
