import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels.measure import Results, Row
from benchmarks.kernels.report import table
from pallas_kernels import average_and_recompress, compress, decompress

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.kernels"]
BLOCK_SIZE = 64
SIZES = (5000, 9000)
WORKERS = 8

OPERATIONS = {
    "Adam's update": ("optax", "elementwise"),
    "compress": ("xla", "elementwise"),
    "compress with momentum": ("xla", "elementwise"),
    "average and recompress": ("xla", "elementwise"),
    "decompress": ("xla", "elementwise"),
    "decompress and apply": ("xla", "elementwise"),
    "step, three jits": ("xla", "Adam's update"),
    "step, one jit": ("xla", "Adam's update"),
    "step and parameters, one jit": ("xla", "Adam's update"),
    "packbits(x >= 0)": ("numpy", None),
    "unpackbits": ("numpy", None),
}
ONLY_FRESH = {"packbits(x >= 0)", "unpackbits"}
ONLY_DONATED = {"step and parameters, one jit"}


def run(*flags):
    return subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    files = folder / "kernels.json", folder / "kernels.png"
    flags = f"--sizes 5e3 9000 1e15 --block-size {BLOCK_SIZE} --repeats 1"
    written = ["--json", str(files[0]), "--picture", str(files[1])]
    done = run(*flags.split(), *written)
    assert done.returncode == 0, done.stderr
    return done, json.loads(files[0].read_text(encoding="utf-8")), files[1]


def test_every_operation_has_a_row(benchmark):
    _, stored, _ = benchmark
    expected = {
        (operation, buffers, size, implementation, baseline)
        for operation, (implementation, baseline) in OPERATIONS.items()
        for buffers in ("fresh", "donated")
        for size in SIZES
        if operation not in (ONLY_FRESH if buffers == "donated" else ONLY_DONATED)
    }
    found = [
        tuple(
            row[key]
            for key in ("operation", "buffers", "size", "implementation", "baseline")
        )
        for row in stored["rows"]
    ]
    assert len(found) == len(expected)
    assert set(found) == expected
    for row in stored["rows"]:
        assert row["milliseconds"] > 0
        rate = row["bytes"] / row["milliseconds"] / 1e6
        assert row["gb_per_s"] == pytest.approx(rate)
        assert (row["ratio"] is None) == (row["baseline"] is None)


def moved(function, *arguments):
    """Bytes of what an operation takes and returns, by its types."""
    leaves = jax.tree.leaves((arguments, jax.eval_shape(function, *arguments)))
    return sum(x.size * x.dtype.itemsize for x in leaves)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_those_of_the_arguments_and_results(benchmark, size):
    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def with_momentum(g, error, m):
        return compress(g, error, block_size=BLOCK_SIZE, momentum=m, decay=0.9)

    def apply(words, scales, nu):
        mu = decompress(words, scales, size)
        return mu, mu / jnp.sqrt(nu)

    x = array(size)
    words, scales, _ = jax.eval_shape(with_momentum, x, x, x)
    # The first server's share, when all workers' shares hold equally many blocks.
    served = next(b for b in range(size) if b * WORKERS >= scales.size)
    average = moved(
        average_and_recompress,
        array(WORKERS, served, BLOCK_SIZE // 32, dtype=jnp.uint32),
        array(WORKERS, served),
        array(served * BLOCK_SIZE),
        array(served, dtype=jnp.int32),
    )
    expected = {
        "Adam's update": 2 * moved(lambda *x: (), x, x, x),
        "compress": moved(lambda g, e: compress(g, e, block_size=BLOCK_SIZE), x, x),
        "compress with momentum": moved(with_momentum, x, x, x),
        "average and recompress": average,
        "decompress": moved(lambda w, s: decompress(w, s, size), words, scales),
        "decompress and apply": moved(apply, words, scales, x),
        "packbits(x >= 0)": 4 * size + (size + 7) // 8,
        "unpackbits": (size + 7) // 8 + size,
    }
    parts = ("compress with momentum", "average and recompress", "decompress and apply")
    step = sum(expected[part] for part in parts)
    expected |= {"step, three jits": step, "step, one jit": step}
    expected["step and parameters, one jit"] = step + 4 * size
    _, stored, _ = benchmark
    for row in stored["rows"]:
        if row["size"] == size:
            assert row["bytes"] == expected[row["operation"]], row["operation"]


def test_the_json_holds_what_the_table_shows(benchmark):
    done, stored, _ = benchmark
    rows = [Row(**row) for row in stored["rows"]]
    assert table(Results(**(stored | {"rows": rows}))) + "\n" == done.stdout
    assert {"platform": "cpu", "threads": 1}.items() <= stored.items()
    assert [(c["size"], c["buffers"]) for c in stored["copies"]] == [
        (size, buffers) for size in SIZES for buffers in ("fresh", "donated")
    ]


def test_a_size_too_large_for_the_memory_is_skipped_with_a_word(benchmark):
    done, stored, _ = benchmark
    line = next(line for line in stored["skipped"] if line.startswith("size"))
    assert line.startswith("size 1,000,000,000,000,000: 64000000.0 GB of arrays")
    assert line in done.stderr.splitlines()


def test_the_picture_is_written(benchmark):
    _, _, picture = benchmark
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--threads 99999", "--threads must be from 1 to"),
        ("--block-size 48", "--block-size must be a power of two from 32 on, not 48."),
        ("--sizes 0", "--sizes, --repeats and --calls must be at least 1."),
    ],
)
def test_flags_that_cannot_be_measured_with_are_refused(flags, message):
    done = run(*flags.split())
    assert done.returncode == 1
    assert done.stderr.startswith(message)
