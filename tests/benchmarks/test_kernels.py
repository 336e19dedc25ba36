"""Operations move the bytes that the table says; whole steps stand beside Adam's."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels.command import Config, main
from benchmarks.kernels.inputs import (
    ADAM,
    DEFAULT,
    STEP,
    bytes_moved,
    make_inputs,
)
from benchmarks.kernels.measure import measure, read_json, text, write_json
from benchmarks.kernels.operations import compression
from train.plan.model import compression_bytes

BLOCK_SIZE = 64
# The buffers that results go to are not read.
READ = {"decompress": 2, "decompress and apply": 3}


def nbytes(*trees):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


@pytest.mark.parametrize("size", [5000, 9000])
def test_bytes_are_those_of_the_arguments_and_results(size):
    x = jax.eval_shape(lambda: make_inputs(size, BLOCK_SIZE))
    counted, moved = {}, bytes_moved(size, BLOCK_SIZE)
    for name, function, arguments, _ in compression(x, BLOCK_SIZE, "xla"):
        results = jax.eval_shape(function, *arguments)
        counted[name] = nbytes(arguments[: READ.get(name)], results)
    assert {name: moved[name] for name in counted} == counted
    steps = "compress with momentum", "average and recompress", "decompress and apply"
    # The parameters are read, and written in the place of the update.
    assert moved[STEP] == sum(counted[name] for name in steps) + nbytes(x.params)
    # Gradient, both moments and parameters; both moments and parameters.
    assert moved[ADAM] == 7 * nbytes(x.value)


def test_the_planner_counts_the_bytes_that_are_measured():
    size = 2**20
    step = bytes_moved(size, 1024)[DEFAULT]
    assert compression_bytes(1) == pytest.approx(step / size, rel=0.003)


def measured(sizes, implementations, **options):
    with jax.numpy_dtype_promotion("standard"):
        *_, results = measure(sizes, implementations, BLOCK_SIZE, 1, 1, **options)
    return results


@pytest.mark.slow
def test_every_operation_is_measured_and_steps_beside_adams(tmp_path):
    file, size = tmp_path / "kernels.json", 128 * BLOCK_SIZE
    results = measured([5000, size], ["xla"])
    names = set(bytes_moved(size, BLOCK_SIZE))
    for each, expected in ((5000, names - {DEFAULT}), (size, names)):
        rows = [row for row in results.rows if row.size == each]
        assert {row.operation for row in rows} == expected
    for row in results.rows:
        assert row.gb_per_s == pytest.approx(row.bytes / row.milliseconds / 1e6)
        assert (row.ratio is None) == (row.operation not in (STEP, DEFAULT))
    write_json(file, results)
    assert read_json(json.loads(file.read_text())) == results
    assert text(results).count("\n| ") == len(results.rows) + len(results.copies) + 2


def test_an_operation_that_fails_is_told_and_the_others_are_measured(monkeypatch):
    """XLA's of all sizes are measured before the first of Mosaic's."""

    def broken(value, error, *, implementation, **_):
        if implementation == "mosaic_interpreted":
            raise RuntimeError("illegal address\nand more")
        return jnp.zeros(2), jnp.zeros(2), value + error

    monkeypatch.setattr("pallas_kernels.compress", broken)
    both = "xla", "mosaic_interpreted"
    found = measured([1024, 2048], both, names=(ADAM, "compress with momentum"))
    rows = [(row.operation, row.size, row.implementation) for row in found.rows]
    assert rows == [
        (name, size, implementation)
        for name, implementation in ((ADAM, "optax"), ("compress with momentum", "xla"))
        for size in (1024, 2048)
    ]
    for size in ("1,024", "2,048"):
        what = f"compress with momentum, {size}, mosaic_interpreted"
        assert f"- {what}: not measured: illegal address\n" in text(found) + "\n"


def test_sizes_that_cannot_be_measured_are_refused():
    with pytest.raises(SystemExit, match="--sizes and --repeats must be at least 1"):
        main(Config(sizes=(0.0,)))
