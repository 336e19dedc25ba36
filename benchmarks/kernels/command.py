"""The cost of compression: its operations beside the bytes that must move.

    python -m benchmarks.kernels --json kernels.json --picture kernels.png

For N float32 values in B = ⌈N / b⌉ blocks of b, W = B b / 32 words, and n = 8 workers
of which each serves S = ⌈B / n⌉ blocks, an operation must read and write

| operation | 4-byte numbers read | written |
|---|---|---|
| compress | 2 N | N + W + B |
| compress with momentum | 3 N | N + W + B |
| average and recompress | S (b (1 + n / 32) + n + 1) | S (33 b / 32 + 1) |
| decompress | W + B | N |
| decompress and apply | N + W + B | 2 N |
| Adam's update | 3 N | 3 N |

and a step the sum of its three operations. `numpy.packbits(x >= 0)` must read 4 N
bytes and write N / 8, `numpy.unpackbits` read N / 8 and write N.

Each call of an operation is followed by one of its baseline, and the ratio is the
median over these pairs. An operation's baseline is plain elementwise and reads and
writes as many bytes, in arrays of the same sizes; what has nothing of its size to be
made from is filled with one number (and the words of what decompresses are not read).
A step's baseline is `optax.adam`'s update.

Fresh: results go to buffers that are made for them, whose pages a CPU's operating
system has yet to provide. Donated: errors and momentum are updated in place, and so is
the state of Adam; the baseline is given the same. The copy that an operation's bytes a
second are a share of is one of N float32 values, to a fresh buffer or to one that is
there already.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Config:
    """Times the operations of compression beside their baselines."""

    sizes: tuple[float, ...] = ()
    """Values of a buffer; default: 1e6 1.1e7 1.1e8, on a GPU up to 4e8."""
    implementations: tuple[str, ...] = ()
    """Names of implementations; default: xla, and mosaic on a GPU of compute capability
    9 or more."""
    block_size: int = 1024
    """Values a scale."""
    repeats: int = 11
    """Timed pairs of calls, of which the median counts."""
    calls: int | None = None
    """Calls that are timed together; default: 1, on a GPU 10."""
    threads: int | None = None
    """Cores that may be used; default: 1, where a GPU computes all."""
    json: Path | None = None
    """Where the results go."""
    picture: Path | None = None
    """Where the picture goes, a PNG."""


def main(config: Config) -> None:
    """Measures, prints a table and writes the files that are asked for."""
    b = config.block_size
    if b < 32 or b & (b - 1):
        raise SystemExit(f"--block-size must be a power of two from 32 on, not {b}.")
    counts = config.repeats, 1 if config.calls is None else config.calls, *config.sizes
    if min(counts) < 1:
        raise SystemExit("--sizes, --repeats and --calls must be at least 1.")
    cores = os.sched_getaffinity(0)
    threads = 1 if config.threads is None else config.threads
    if not 1 <= threads <= len(cores):
        raise SystemExit(f"--threads must be from 1 to {len(cores)}, not {threads}.")
    # Before JAX makes its threads, which inherit it.
    os.sched_setaffinity(0, set(sorted(cores)[:threads]))

    import jax
    from tqdm import tqdm

    from benchmarks.kernels import measure as kernels_measure
    from benchmarks.kernels import report as kernels_report

    gpu = jax.default_backend() == "gpu"
    if gpu and config.threads is None:
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), cores)
    measured = kernels_measure.measure(
        sizes=[int(size) for size in config.sizes],
        implementations=config.implementations,
        block_size=config.block_size,
        repeats=config.repeats,
        calls=config.calls or (10 if gpu else 1),
    )
    *_, results = tqdm(measured, unit=" operations", disable=None)
    print(kernels_report.text(results))
    if config.json:
        kernels_report.write_json(config.json, results)
    if config.picture:
        kernels_report.write_picture(config.picture, results)
