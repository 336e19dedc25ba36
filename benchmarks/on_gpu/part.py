"""The process of one part.

    python -m benchmarks.on_gpu.part NAME FOLDER SECONDS TINY

TINY is empty for full sizes.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

CUT = 3
"""The exit status of a part whose share of the time was too short."""


def main() -> None:
    """Measures a part."""
    name, folder, seconds, tiny = sys.argv[1:]
    from benchmarks.on_gpu.record import OutOfTimeError, Record
    from benchmarks.on_gpu.sizes import SIZES, TINY

    record = Record(Path(folder, f"{name}.json"), float(seconds))
    part = importlib.import_module(f"benchmarks.on_gpu.{name}")
    try:
        part.measure(TINY if tiny else SIZES, record)
    except OutOfTimeError:
        record.write(cut=f"stopped at the end of its share, {float(seconds):.0f} s")
        sys.exit(CUT)


if __name__ == "__main__":
    main()
