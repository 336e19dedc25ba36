"""Replicas that differ in a bit are found, wherever the bit is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax import assert_replicas_identical, replica_mismatches


@pytest.fixture(scope="module", params=[AxisType.Auto, AxisType.Explicit])
def mesh(request):
    return jax.make_mesh((8,), ("data",), axis_types=(request.param,))


@pytest.fixture(scope="module")
def mesh_2d():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def placed(mesh, spec, copies):
    """A vector whose parts on the devices need not be what its sharding claims."""
    sharding = NamedSharding(mesh, spec)
    buffers = list(map(jax.device_put, copies, mesh.devices.flat))
    pieces = mesh.size // sharding.shard_shape((mesh.size,))[0]
    size = buffers[0].shape[0] * pieces
    return jax.make_array_from_single_device_arrays((size,), sharding, buffers)


def replicated(mesh, values):
    """A replicated array that holds `values[k]` on worker k."""
    return placed(mesh, P(), values)


def with_bits(x, *changes):
    """A copy of x with the bits of some elements flipped."""
    x = np.array(x)
    flat = x.reshape(-1).view(np.uint8).reshape(x.size, -1)
    for element, byte, bit in changes:
        flat[element, byte] ^= 1 << bit
    return x


def test_identical_replicas(mesh):
    tree = jax.device_put(
        {
            "w": np.linspace(-1, 1, 1000, dtype=np.float32).reshape(10, 100),
            "nan": np.float32([np.nan, np.inf, -0.0]),
            "empty": np.zeros((0, 3)),
            "scalar": jnp.int32(3),
            "key": jax.random.key(0),
        },
        NamedSharding(mesh, P()),
    )
    assert replica_mismatches(tree, mesh) == {}
    assert_replicas_identical(tree, mesh, "data")
    assert replica_mismatches({}, mesh) == {}


DTYPES = [
    "float32", "bfloat16", "float16", "float8_e4m3fn", "complex64",
    "int32", "uint8", "int16", "int4", "bool",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_of_one_replica(mesh, dtype):
    x = np.asarray(jnp.zeros(37, dtype))
    values = [x] * 8
    values[5] = with_bits(x, (36, 0, 0))
    values[2] = with_bits(x, (0, x.itemsize - 1, 0))
    tree = {"good": replicated(mesh, [x] * 8), "bad": [replicated(mesh, values)]}
    assert replica_mismatches(tree, mesh) == {"['bad'][0]": [2, 5]}


def test_64_bits_and_keys(mesh):
    with jax.enable_x64(True):
        for dtype in (np.float64, np.int64):
            x = np.ones(5, dtype)
            for byte in range(8):
                tree = replicated(mesh, [x] * 7 + [with_bits(x, (3, byte, 0))])
                assert replica_mismatches(tree, mesh) == {"": [7]}
    keys = [jax.random.split(jax.random.key(seed), 3) for seed in (0, 1)]
    tree = replicated(mesh, [keys[0]] * 6 + [keys[1], keys[0]])
    assert replica_mismatches(tree, mesh) == {"": [6]}


X = np.arange(1, 65, dtype=np.float32)
SIGN = 7
ZERO, NAN = np.zeros(3, np.float32), np.full(3, np.nan, np.float32)


@pytest.mark.parametrize(
    ("x", "changed"),
    [
        pytest.param(X, with_bits(X, (3, 3, SIGN), (40, 3, SIGN)), id="two signs"),
        pytest.param(X, with_bits(X, (3, 0, 0), (4, 0, 0)), id="two low bits"),
        pytest.param(X, np.roll(X, 1), id="shifted"),
        pytest.param(X, X[[1, 0, *range(2, 64)]], id="swapped"),
        pytest.param(X, X[::-1], id="reversed"),
        pytest.param(ZERO, -ZERO, id="zeros"),
        pytest.param(NAN, with_bits(NAN, (0, 0, 0)), id="nans"),
    ],
)
def test_changes_that_a_sum_would_miss(mesh, x, changed):
    tree = replicated(mesh, [x, changed] + [x] * 6)
    # np.asarray looks at one copy only: this is why the check is there.
    assert tree.sharding.is_fully_replicated
    np.testing.assert_array_equal(np.asarray(tree), x)
    assert replica_mismatches(tree, mesh) == {"": [1]}


def test_axes_of_a_mesh(mesh_2d):
    # Device k stands at (data, model) = (k // 2, k % 2).
    half = [X if k % 2 == 0 else -X for k in range(8)]
    bad_half = [*half[:5], X, *half[6:]]
    tree = {
        "split over model": placed(mesh_2d, P("model"), half),
        "one shard differs": placed(mesh_2d, P("model"), bad_half),
        "differs along model": replicated(mesh_2d, half),
        "split over data": placed(mesh_2d, P("data"), half),
        "split over both": placed(mesh_2d, P(("data", "model")), bad_half),
    }
    assert replica_mismatches(tree, mesh_2d, "data") == {"['one shard differs']": [2]}
    assert replica_mismatches(tree, mesh_2d, "model") == {
        "['differs along model']": [1],
        "['split over data']": [1],
    }
    assert replica_mismatches(tree, mesh_2d) == {
        "['differs along model']": [1, 3, 5, 7],
        "['one shard differs']": [5],
        "['split over data']": [1, 3, 5, 7],
    }
    # Workers are numbered in the order in which the axes are given.
    tree = replicated(mesh_2d, [X, X, with_bits(X, (0, 0, 0)), *[X] * 5])
    assert replica_mismatches(tree, mesh_2d, ("data", "model")) == {"": [2]}
    assert replica_mismatches(tree, mesh_2d, ("model", "data")) == {"": [1]}


def test_the_error_names_arrays_and_workers(mesh):
    tree = {"w": replicated(mesh, [X] * 7 + [-X]), "b": replicated(mesh, [X] * 8)}
    message = r"^replicas differ from worker 0's in \['w'\] on workers \[7\]$"
    with pytest.raises(AssertionError, match=message):
        assert_replicas_identical(tree, mesh)
    many = [tree["w"]] * 11
    with pytest.raises(AssertionError, match=r"\[7\] on workers \[7\] and 3 more$"):
        assert_replicas_identical(many, mesh)


def test_bad_questions(mesh):
    good = jax.device_put(X, NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match="not 'dta'"):
        replica_mismatches(good, mesh, "dta")
    other = jax.make_mesh((4,), ("data",), axis_types=mesh.axis_types)
    elsewhere = jax.device_put(X, NamedSharding(other, P()))
    for bad in (X, jnp.ones(3), 3, elsewhere):
        with pytest.raises(ValueError, match=r"\['x'\] is not placed on this mesh"):
            replica_mismatches({"x": bad}, mesh)
