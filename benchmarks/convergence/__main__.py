"""`python -m benchmarks.convergence`: see `benchmarks.convergence.command`."""

import tyro

from benchmarks.convergence.command import Config, main

if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.convergence"))
