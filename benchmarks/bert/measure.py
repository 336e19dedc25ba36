"""Times the programs of `benchmarks.bert`, all of a length in turn."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from benchmarks.bert import hugging_face
from benchmarks.bert.implementations import (
    COMPILED,
    EAGER,
    Training,
    of_hugging_face,
)
from benchmarks.bert.programs import shapes, variants
from benchmarks.bert.results import PassTiming, ProductRate, Results
from benchmarks.machine import processor
from benchmarks.product import product
from benchmarks.timing import seconds as timed
from models import SIZES
from train.plan.flops import OF_FORWARD, forward_flops

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.bert.config import Config
    from benchmarks.bert.implementations import Implementation
    from benchmarks.bert.programs import Shape

UNTIMED = 2
"""Calls before the clock runs: the first compiles, the second may tune."""

NEEDED = {
    "forward": {"forward"},
    "backward": {"forward", "gradients"},
    "step": {"step"},
}
"""Programs that are timed for each pass."""

CALLS = {"cpu": 1, "gpu": 5}
PACKAGES = "jax", "flax", "optax", "numpy", "torch", "transformers"


def measure(config: Config) -> Iterator[Results]:
    """Measures every model and length.

    Args:
      config: The flags.

    Yields:
      The results, after each length with that one's.
    """
    device = jax.devices()[0]
    results = Results(
        platform=device.platform,
        device_kind=device.device_kind,
        processor=processor(),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        versions=_versions(),
        settings=_settings(config),
    )
    why = "PyTorch: not asked for" if not config.peers else hugging_face.why_no_torch()
    if why:
        _skip(results, why)
    for shape in shapes(config, device.platform):
        _measure_shape(results, config, shape, compare=not why)
        if not why:
            hugging_face.free()
        yield results


def _measure_shape(
    results: Results, config: Config, shape: Shape, compare: bool
) -> None:
    where = f"{shape.model}, {shape.batch} x {shape.length}"
    names = tuple(sorted(set().union(*(NEEDED[name] for name in config.passes))))
    platform = results.platform
    implementations: list[Implementation] = []
    if compare:
        # PyTorch's errors are reported, and end nothing.
        try:
            made = of_hugging_face(shape, platform, names, config.peers)
        except Exception as error:
            made = []
            _skip(results, f"{where}, transformers: {_first_line(error)}")
        for implementation in made:
            try:
                _warm_up(implementation)
            except Exception as error:
                what = f"{where}, {implementation.name}"
                _skip(results, f"{what}: {_first_line(error)}")
            else:
                implementations.append(implementation)
    training = Training(config, shape, names)
    for attention, remat in variants(config, platform):
        try:
            implementation = training.implementation(attention, remat)
            _warm_up(implementation)
        # Not for these sizes, not on this device, or too large for it.
        except (ValueError, RuntimeError) as error:
            what = f"{where}, attention {attention}, remat {remat}"
            _skip(results, f"{what}: {_first_line(error)}")
        else:
            implementations.append(implementation)
    if implementations:
        _measure_in_turn(results, config, shape, implementations)


def _warm_up(implementation: Implementation) -> None:
    for call in implementation.calls.values():
        for _ in range(UNTIMED):
            implementation.wait(call())


def _measure_in_turn(
    results: Results,
    config: Config,
    shape: Shape,
    implementations: Sequence[Implementation],
) -> None:
    calls = config.calls or CALLS.get(results.platform, CALLS["gpu"])
    size, multiply = product(shape.dtype, results.platform)
    for _ in range(UNTIMED):
        jax.block_until_ready(multiply())
    times: list[dict[str, list[float]]] = [
        {name: [] for name in implementation.calls}
        for implementation in implementations
    ]
    peak: list[float] = []
    for _ in range(config.repeats):
        peak.append(timed(multiply, jax.block_until_ready, calls))
        for implementation, taken in zip(implementations, times, strict=True):
            for name, call in implementation.calls.items():
                taken[name].append(timed(call, implementation.wait, calls))
    baseline = baseline_of(implementations)
    rate = [2 * size**3 / seconds / 1e12 for seconds in peak]
    results.peaks.append(
        ProductRate(
            shape.model,
            shape.length,
            shape.dtype,
            size,
            _label(implementations[baseline]),
            _quartiles(rate),
        )
    )
    for name in config.passes:
        beside = seconds_of_pass(name, times[baseline])
        for implementation, taken in zip(implementations, times, strict=True):
            seconds = seconds_of_pass(name, taken)
            row = timing(
                shape, implementation, name, seconds, beside, float(np.median(rate))
            )
            results.rows.append(row)


def seconds_of_pass(name: str, taken: dict[str, list[float]]) -> list[float]:
    """The seconds of a pass, round by round.

    Args:
      name: 'forward', 'backward' or 'step'.
      taken: Seconds of each program, by its name.

    Returns:
      Of the backward pass the gradients' less the forward pass's of the same round.
    """
    if name == "backward":
        both = zip(taken["gradients"], taken["forward"], strict=True)
        return [gradients - forward for gradients, forward in both]
    return taken[name]


def timing(
    shape: Shape,
    implementation: Implementation,
    name: str,
    seconds: list[float],
    beside: list[float],
    peak: float,
) -> PassTiming:
    """The numbers that follow from a pass's seconds.

    Args:
      shape: The size of the computation.
      implementation: The implementation.
      name: 'forward', 'backward' or 'step'.
      seconds: Seconds of a call, in each round.
      beside: Seconds of the baseline's call, in each round.
      peak: TFLOP/s of the matrix product.

    Returns:
      The timing.
    """
    median = float(np.median(seconds))
    size = SIZES[shape.model]
    flops = OF_FORWARD[name] * shape.batch
    flops *= forward_flops(size, shape.length, implementation.predictions)
    program = "gradients" if name == "backward" else name
    return PassTiming(
        **shape._asdict(),
        implementation=implementation.name,
        attention=implementation.attention,
        remat=implementation.remat,
        predictions=implementation.predictions,
        name=name,
        seconds=seconds,
        milliseconds=[1e3 * t for t in _quartiles(seconds)],
        examples_per_second=shape.batch / median,
        flops=flops,
        tflops_per_second=flops / median / 1e12,
        of_peak=flops / median / 1e12 / peak,
        speed_up=_quartiles([b / s for b, s in zip(beside, seconds, strict=True)]),
        held_bytes=implementation.held_bytes.get(program),
    )


def baseline_of(implementations: Sequence[Implementation]) -> int:
    """The index of the baseline: PyTorch's best form, or our first."""
    names = [implementation.name for implementation in implementations]
    for name in (COMPILED, EAGER):
        if name in names:
            return names.index(name)
    return 0


def _label(implementation: Implementation) -> str:
    attention, remat = implementation.attention, implementation.remat
    return f"{implementation.name} ({attention}, remat {remat})"


def _quartiles(values: Sequence[float]) -> list[float]:
    return np.quantile(values, (0.25, 0.5, 0.75)).tolist()


def _first_line(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return f"not measured: {text.splitlines()[0]}"


def _skip(results: Results, line: str) -> None:
    print(line, file=sys.stderr)
    results.skipped.append(line)


def _settings(config: Config) -> dict[str, Any]:
    return {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name not in ("json", "page", "compile")
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
