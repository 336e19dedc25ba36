"""All that waits for a GPU, in one command of some minutes.

    python -m benchmarks.on_gpu --out FOLDER --minutes 8
    python -m benchmarks.on_gpu --pages FOLDER [FOLDER ...]

The first measures on the GPU at hand, part by part in order of worth, each in a process
of its own that is ended when its share of the minutes is over; what a part leaves goes
to those after it. In FOLDER are, from the moment that they are known, `PART.json` and
`PART.log`, how each part ended in `run.json`, and the compiled programs, which a later
call with the same FOLDER uses again. What is not installed is said at once, and left
out.

The second writes what was found into the documentation, with the name of the GPU; of
two GPUs both folders are given.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.on_gpu.pages import write_pages
from benchmarks.on_gpu.run import PARTS, ROOT, run

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.on_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FOLDER", help="measure, into it")
    what.add_argument(
        "--pages", type=Path, nargs="+", metavar="FOLDER", help="publish from them"
    )
    parser.add_argument("--minutes", type=float, default=8, help="in all (default: 8)")
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=names,
        default=names,
        metavar="PART",
        help=f"some of {', '.join(names)} (default: all)",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="small sizes on a CPU, Mosaic interpreted: proves that it runs",
    )
    given = parser.parse_args(arguments)
    if given.pages:
        write_pages(given.pages, ROOT / "docs")
        return
    if given.minutes <= 0:
        parser.error("--minutes must be more than 0")
    chosen = [part for part in PARTS if part.name in given.parts]
    ends = run(chosen, given.out, given.minutes, tiny=given.tiny)
    sys.exit(any(end["end"] == "failed" for end in ends.values()))
