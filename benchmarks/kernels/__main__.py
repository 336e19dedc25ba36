"""`python -m benchmarks.kernels`: see `benchmarks.kernels.command`."""

import tyro

from benchmarks.kernels.command import Config, main

if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.kernels"))
