"""The results of the kernels: their suite against NumPy's float64, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from benchmarks.on_gpu.run import ROOT

if TYPE_CHECKING:
    from benchmarks.on_gpu.part import Record
    from benchmarks.on_gpu.sizes import Sizes

SUITE = "tests/pallas_kernels/test_kernels.py"


class Device:
    """A plugin of pytest that refuses another device, once JAX is configured."""

    def __init__(self, sizes: Sizes, record: Record):
        self.sizes, self.record = sizes, record

    def pytest_sessionstart(self) -> None:
        """Refuses it."""
        self.record.device(self.sizes)


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part: by implementation whether all tests have passed.

    The log has the name of each test, and what the failed ones said.
    """
    for implementation in (sizes.mosaic, "xla"):
        passed = run_suite(implementation, sizes, record)
        record.write(**{implementation: passed})
        # On a device that a kernel has broken the next implementation's tests fail.
        jax.block_until_ready(jnp.zeros(1) + 1)


def run_suite(implementation: str, sizes: Sizes, record: Record) -> bool:
    """The outcome of an implementation's tests, True where they pass.

    Raises:
      SystemExit: Pytest has not run them.
    """
    import pytest

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
    status = pytest.main(arguments, plugins=[Device(sizes, record)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"The tests of {implementation} were not run: {status!r}.")
    return status == pytest.ExitCode.OK
