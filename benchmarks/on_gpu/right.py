"""The results of the kernels: their suite against NumPy's float64, on the device."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.on_gpu.device import device
from benchmarks.on_gpu.run import ROOT

if TYPE_CHECKING:
    from benchmarks.on_gpu.record import Record
    from benchmarks.on_gpu.sizes import Sizes

SUITE = "tests/pallas_kernels/test_kernels.py"
SANITIZED = "numbers_that_are_hard"
SANITIZER_SECONDS = 60
LINES = 30
"""Last lines of a failure that are kept."""

AVERAGE = "average", "what_workers_sent"
"""Words in the names of the tests of averaging; others test compression."""


class Tests:
    """A plugin of pytest that keeps each outcome, and stops when time is over."""

    def __init__(self, implementation: str, sizes: Sizes, record: Record):
        self.implementation, self.sizes, self.record = implementation, sizes, record
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.complete = False

    def pytest_sessionstart(self, session: Any) -> None:
        """Refuses another device; pytest has configured JAX by now."""
        self.session = session
        device(self.sizes)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keeps an outcome."""
        if report.when != "call" and report.passed:
            return
        about = {"outcome": report.outcome, "seconds": report.duration}
        if report.failed:
            about["said"] = report.longreprtext.split("\n")[-LINES:]
        self.outcomes[report.nodeid.rpartition("::")[2]] = about
        self.write()
        if self.record.left <= 0:
            self.session.shouldstop = "the share of the time is over"

    def pytest_sessionfinish(self, session: Any) -> None:
        """Notes whether all have run."""
        self.complete = not session.shouldstop and bool(self.outcomes)
        self.write()

    def write(self) -> None:
        """Writes what is known so far."""
        tests = self.record.values.get("tests", {})
        found = {
            "complete": self.complete,
            "right": verdicts(self.outcomes, self.complete),
            "outcomes": self.outcomes,
        }
        self.record.write(tests={**tests, self.implementation: found})


def verdicts(
    outcomes: dict[str, dict[str, Any]], complete: bool
) -> dict[str, bool | None]:
    """Which operations are right.

    Args:
      outcomes: Of the tests, by their names.
      complete: Whether all have run.

    Returns:
      By name: False where a test has failed, else True where all have run, else None.
    """
    failed = [name for name, x in outcomes.items() if x["outcome"] == "failed"]
    of_average = [name for name in failed if any(word in name for word in AVERAGE)]
    passed = True if complete else None
    return {
        "compress": False if len(failed) > len(of_average) else passed,
        "average_and_recompress": False if of_average else passed,
    }


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part."""
    import pytest

    for implementation in (sizes.mosaic, "xla"):
        tests = Tests(implementation, sizes, record)
        pytest.main(_arguments(implementation, sizes.tests), plugins=[tests])
        record.check()
    record.write(sanitizer=_sanitize(sizes, record))


def _arguments(implementation: str, chosen: str) -> list[str]:
    return [
        str(ROOT / SUITE),
        f"--rootdir={ROOT}",
        f"--config-file={ROOT / 'pyproject.toml'}",
        "--implementation",
        implementation,
        "-k",
        f"{implementation} and ({chosen or implementation})",
        "--quiet",
        "-pno:cacheprovider",
        # A warning of a library is no wrong result.
        "-Wdefault",
    ]


def _sanitize(sizes: Sizes, record: Record) -> str:
    """The words of compute-sanitizer on one case."""
    if not (command := shutil.which("compute-sanitizer")):
        return "not installed"
    asked = [command, "--tool", "memcheck", sys.executable, "-m", "pytest"]
    asked += _arguments(sizes.mosaic, SANITIZED)
    try:
        answer = subprocess.run(
            asked,
            capture_output=True,
            text=True,
            check=False,
            timeout=min(SANITIZER_SECONDS, max(1.0, record.left)),
        )
    except subprocess.TimeoutExpired:
        return "cut: its time was over"
    print(answer.stdout, answer.stderr)
    said = re.findall(r"=+ (ERROR SUMMARY: .*)", answer.stdout + answer.stderr)
    return said[-1] if said else f"ended with {answer.returncode}; see the log"
