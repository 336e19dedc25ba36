"""The machine that a benchmark runs on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """The name of the CPU."""
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
