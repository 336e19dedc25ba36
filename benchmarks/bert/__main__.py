"""`python -m benchmarks.bert`: see `benchmarks.bert.command`."""

import tyro

from benchmarks.bert.command import main
from benchmarks.bert.config import Config

if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.bert"))
