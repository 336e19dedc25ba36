"""The learning of 1-bit Adam beside Adam's: held-out loss of a small BERT.

    python -m benchmarks.convergence --page docs/convergence.md

Adam's learning rate is tuned first; every arm is then trained at that rate, on the same
samples, from the same parameters, for several seeds. 1-bit Adam is tuned on the same
grid, and trained at its own best rate. Then other numbers of workers, each beside Adam,
and other freeze steps.

What the JSON already holds is not trained again, and a run that was interrupted goes on
from its newest checkpoint, exactly. The weights of every run stay in `--runs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.convergence.report import text, write_picture
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.study import study
from benchmarks.page import fill

if TYPE_CHECKING:
    from benchmarks.convergence.config import Config
    from benchmarks.convergence.study import Study


def main(config: Config) -> None:
    """Trains what the JSON lacks, and writes JSON, page and picture after each run."""
    if config.page:  # Its faults are said before anything is trained.
        fill(config.page.read_text(encoding="utf-8"), config.out.name, "")

    def write(so_far: Study) -> None:
        if config.page:
            page = config.page.read_text(encoding="utf-8")
            filled = fill(page, config.out.name, text(so_far))
            config.page.write_text(filled, encoding="utf-8")
        write_picture(config.out.with_suffix(".png"), so_far)

    complete = study(config, Runs(config), write)
    write(complete)
    print(text(complete))
