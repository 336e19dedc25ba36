"""The cost of compression: its operations beside the bytes that must move.

    python -m benchmarks.kernels --json kernels.json

For N float32 values in B = ⌈N / b⌉ blocks of b, W = B b / 32 words, and n = 8 workers
of which each serves S = ⌈B / n⌉ blocks, an operation must read and write

| operation | 4-byte numbers read | written |
|---|---|---|
| compress | 2 N | N + W + B |
| compress with momentum | 3 N | N + W + B |
| average and recompress | S (b (1 + n / 32) + n + 1) | S (33 b / 32 + 1) |
| decompress | W + B | N |
| decompress and apply | N + W + B | 2 N |
| Adam's step | 4 N | 3 N |

and a step the sum of its three operations and of the parameters (N read and written,
where the update was only written). The step of `onebit_adam` reads the momentum before,
too, for its lead, and its one worker averages all blocks: n = 1.

Everything is in place: errors, momentum, parameters and Adam's state are donated. The
copy that an operation's bytes a second are a share of is one of N float32 values to a
buffer that is there already. Each call of a whole step is followed by one of Adam's,
parameters too, and the ratio is the median over these pairs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

BLOCK_SIZE = 1024
"""Values a scale, b."""


@dataclass(frozen=True)
class Config:
    """Times the operations of compression, and whole steps beside Adam's.

    On one core, or on a GPU with ten calls timed together.
    """

    sizes: tuple[float, ...] = ()
    """Values of a buffer; default: 1 and 11 million, on a GPU 110 and 335 million."""
    implementations: tuple[str, ...] = ()
    """Names of implementations; default: xla, and mosaic on a GPU of compute capability
    9 or more."""
    repeats: int = 11
    """Timed calls, of which the median counts."""
    json: Path | None = None
    """Where the results go."""


def main(config: Config) -> None:
    """Measures, prints a table and writes the file that is asked for."""
    if min(config.repeats, *config.sizes, 1) < 1:
        raise SystemExit("--sizes and --repeats must be at least 1.")
    # Before JAX makes its threads, which inherit it.
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})

    import jax
    from tqdm import tqdm

    from benchmarks.kernels.measure import measure, text, write_json

    gpu = jax.default_backend() == "gpu"
    if gpu:
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), cores)
    measured = measure(
        sizes=[int(size) for size in config.sizes],
        implementations=config.implementations,
        block_size=BLOCK_SIZE,
        repeats=config.repeats,
        calls=10 if gpu else 1,
    )
    *_, results = tqdm(measured, unit=" operations", disable=None)
    print(text(results))
    if config.json:
        write_json(config.json, results)
