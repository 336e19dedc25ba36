"""`python -m benchmarks.convergence`: see `benchmarks.convergence.command`."""

import tyro

from benchmarks.convergence.command import main
from benchmarks.convergence.config import Config

if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.convergence"))
