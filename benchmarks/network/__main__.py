"""`python -m benchmarks.network`: see `benchmarks.network.command`."""

import tyro

from benchmarks.network.command import main
from benchmarks.network.config import Config

if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.network"))
