"""The results of the kernels: their suite against NumPy's float64, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from benchmarks.on_gpu.run import ROOT

if TYPE_CHECKING:
    from benchmarks.on_gpu.part import Record
    from benchmarks.on_gpu.sizes import Sizes

SUITE = "tests/pallas_kernels/test_kernels.py"
LINES = 30
"""Last lines of a failure that are kept."""

AVERAGE = "average", "what_workers_sent"
"""Words in the names of the tests of averaging; others test compression."""

BOTH = "optimizer"
"""The word in the names of the tests of both."""


class Tests:
    """A plugin of pytest that keeps each outcome, and stops when time is over."""

    def __init__(self, implementation: str, sizes: Sizes, record: Record):
        self.implementation, self.sizes, self.record = implementation, sizes, record
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.complete = False

    def pytest_sessionstart(self, session: Any) -> None:
        """Refuses another device; pytest has configured JAX by now."""
        self.session = session
        self.record.device(self.sizes)

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
    """By operation False where a test has failed, else True where all have run."""
    failed = [name for name, x in outcomes.items() if x["outcome"] == "failed"]
    of_average = [name for name in failed if any(word in name for word in AVERAGE)]
    of_both = any(BOTH in name for name in failed)
    passed = True if complete else None
    return {
        "compress": False if len(failed) > len(of_average) else passed,
        "average_and_recompress": False if of_average or of_both else passed,
    }


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part."""
    for implementation in (sizes.mosaic, "xla"):
        run_suite(implementation, sizes, record)
        record.check()
        # On a device that a kernel has broken the next implementation's tests fail.
        jax.block_until_ready(jnp.zeros(1) + 1)


def run_suite(implementation: str, sizes: Sizes, record: Record) -> None:
    """Runs the tests of an implementation, whose outcomes the record takes.

    Raises:
      SystemExit: Pytest has not run them, for another reason than the time.
    """
    import pytest

    tests = Tests(implementation, sizes, record)
    arguments = [
        str(ROOT / SUITE),
        f"--rootdir={ROOT}",
        f"--config-file={ROOT / 'pyproject.toml'}",
        "--implementation",
        implementation,
        "-k",
        f"{implementation} and ({sizes.tests or implementation})",
        # The log has the name of a test that hangs.
        "--verbose",
        "-pno:cacheprovider",
        # A warning of a library is no wrong result.
        "-Wdefault",
    ]
    status = pytest.main(arguments, plugins=[tests])
    ran = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED
    if status not in ran and record.left > 0:
        raise SystemExit(f"The tests of {implementation} were not run: {status!r}.")
