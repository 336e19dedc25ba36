"""Operations and their baselines move the bytes that the table says."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels.command import Config, main
from benchmarks.kernels.inputs import WORKERS, bytes_moved, make_inputs
from benchmarks.kernels.measure import measure
from benchmarks.kernels.operations import compression, elementwise
from benchmarks.kernels.report import text, write_json, write_picture
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
        plain = jax.eval_shape(elementwise(name, size, BLOCK_SIZE), *arguments)
        assert nbytes(plain) == nbytes(results), name
    assert {name: moved[name] for name in counted} == counted
    steps = "compress with momentum", "average and recompress", "decompress and apply"
    step = sum(counted[name] for name in steps)
    assert moved["step, one jit"] == moved["step, three jits"] == step
    assert moved["step and parameters, one jit"] == step + nbytes(x.params)
    # The lead reads the momentum of the step before.
    expected = step + nbytes(x.params, x.momentum)
    assert moved["step and parameters, onebit_adam"] == expected
    # Gradient, both moments; both moments and the update.
    assert moved["Adam's update"] == 6 * nbytes(x.value)
    bits = jnp.packbits(jnp.zeros(size, bool)).nbytes
    assert moved["packbits(x >= 0)"] == nbytes(x.value) + bits
    assert moved["unpackbits"] == bits + size


def test_the_planner_counts_the_bytes_that_are_measured():
    size = 2**20
    step = bytes_moved(size, 1024)["step and parameters, onebit_adam"]
    assert compression_bytes(WORKERS) == pytest.approx(step / size, rel=0.003)


@pytest.mark.slow
def test_every_operation_is_measured_beside_its_baseline(tmp_path, capsys):
    too_large = 10**15
    with jax.numpy_dtype_promotion("standard"):
        *_, results = measure(
            [5000, too_large], ["xla"], BLOCK_SIZE, repeats=1, calls=1
        )
    compressing = {(name, "elementwise") for name in bytes_moved(5000, BLOCK_SIZE)}
    compressing = {pair for pair in compressing if "compress" in pair[0]}
    both = {("Adam's update", "elementwise"), *compressing}
    both |= {(f"step, {form}", "Adam's update") for form in ("three jits", "one jit")}
    numpy = {("packbits(x >= 0)", None), ("unpackbits", None)}
    in_place = {("step and parameters, one jit", "Adam's update")}
    for buffers, expected in (("fresh", both | numpy), ("donated", both | in_place)):
        rows = [row for row in results.rows if row.buffers == buffers]
        assert {(row.operation, row.baseline) for row in rows} == expected
        assert len(rows) == len(expected)
    for row in results.rows:
        assert row.gb_per_s == pytest.approx(row.bytes / row.milliseconds / 1e6)
        assert (row.ratio is None) == (row.baseline is None)
    said = capsys.readouterr().err
    assert "size 1,000,000,000,000,000: 64000000.0 GB of arrays are more" in said
    write_json(tmp_path / "kernels.json", results)
    stored = json.loads((tmp_path / "kernels.json").read_text())
    assert len(stored["rows"]) == len(results.rows)
    assert text(results).count("\n| ") == len(results.rows) + len(results.copies) + 2
    write_picture(tmp_path / "kernels.png", results)
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"threads": 99999}, "--threads must be from 1 to"),
        ({"block_size": 48}, "--block-size must be a power of two from 32 on, not 48."),
        ({"sizes": (0.0,)}, "--sizes, --repeats and --calls must be at least 1."),
    ],
)
def test_flags_that_cannot_be_measured_with_are_refused(flags, message):
    with pytest.raises(SystemExit, match=message):
        main(Config(**flags))
