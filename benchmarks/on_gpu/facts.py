"""The device, versions, and rate of a matrix product."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from benchmarks.machine import processor
from benchmarks.timing import seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.on_gpu.part import Record
    from benchmarks.on_gpu.sizes import Sizes

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "flax",
    "optax",
    "numpy",
)
DRIVER = "driver_version", "memory.total", "power.limit", "clocks.max.sm"
"""Fields of nvidia-smi, whose values it prints with units."""
SETTINGS = "JAX_", "XLA_", "NVIDIA_TF32_OVERRIDE"
"""Prefixes of the environment variables that change what is measured."""


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part."""
    found = record.device(sizes)
    record.write(
        device_kind=found.device_kind,
        platform=found.platform,
        compute_capability=getattr(found, "compute_capability", None),
        memory_bytes=(found.memory_stats() or {}).get("bytes_limit"),
        processor=processor(),
        python=platform.python_version(),
        versions=_versions(),
        environment={
            name: value
            for name, value in os.environ.items()
            if name.startswith(SETTINGS) and name != "JAX_COMPILATION_CACHE_DIR"
        },
    )
    record.write(driver=driver())
    # Not zeros, which a GPU multiplies with less power and so at a higher clock.
    a, b = (
        jax.random.normal(key, (sizes.product,) * 2, jnp.dtype(sizes.dtype))
        for key in jax.random.split(jax.random.key(0))
    )
    multiply = jax.jit(jnp.matmul)
    rate = 2 * sizes.product**3 / _median(lambda: multiply(a, b), sizes) / 1e12
    record.write(
        product={
            "dtype": sizes.dtype,
            "size": sizes.product,
            "tflops_per_second": rate,
        }
    )


def _median(call: Callable[[], Any], sizes: Sizes) -> float:
    times = [
        seconds(call, jax.block_until_ready, sizes.calls)
        for _ in range(sizes.repeats + 1)
    ]
    return statistics.median(times[1:])


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def driver() -> dict[str, str]:
    """The driver and what it lets the first GPU do; empty where nothing tells."""
    if not (command := shutil.which("nvidia-smi")):
        return {}
    asked = [command, f"--query-gpu={','.join(DRIVER)}", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    if answer.returncode:
        said = (answer.stdout + answer.stderr).strip()
        return {"nvidia-smi": f"ended with {answer.returncode}: {said}"}
    first = answer.stdout.partition("\n")[0].split(", ")
    return dict(zip(DRIVER, first, strict=True))
