"""The results of `benchmarks.bert`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PassTiming:
    """One pass of one implementation.

    Attributes:
      model: A size by name.
      length: Tokens of a sequence.
      batch: Sequences.
      dtype: Name of the dtype that is computed in.
      implementation: Name of the implementation.
      attention: Its attention.
      remat: Its policy of recomputing for the backward pass.
      predictions: Positions of a sequence that are projected to the vocabulary.
      name: 'forward', 'backward' or 'step'.
      seconds: Seconds of a call, in each round.
      milliseconds: Their first quartile, median and third quartile.
      examples_per_second: Sequences, at the median.
      flops: FLOP of a call.
      tflops_per_second: TFLOP/s, at the median.
      of_peak: Share of the matrix product's rate, at the medians.
      speed_up: Quartiles of the baseline's time over this one's, round by round.
      held_bytes: Memory that its program needs, where known.
    """

    model: str
    length: int
    batch: int
    dtype: str
    implementation: str
    attention: str
    remat: str
    predictions: int
    name: str
    seconds: list[float]
    milliseconds: list[float]
    examples_per_second: float
    flops: int
    tflops_per_second: float
    of_peak: float
    speed_up: list[float]
    held_bytes: int | None


@dataclass(frozen=True)
class ProductRate:
    """The rate of the matrix product in the same rounds.

    Attributes:
      model: The size it was measured beside.
      length: Tokens of a sequence.
      dtype: Name of the dtype.
      size: Rows and columns of its square factors.
      baseline: The implementation that `speed_up` of these rounds' rows is over.
      tflops_per_second: First quartile, median and third quartile.
    """

    model: str
    length: int
    dtype: str
    size: int
    baseline: str
    tflops_per_second: list[float]


@dataclass
class Results:
    """All that was measured, and on which machine.

    Attributes:
      platform: JAX's name of the platform.
      device_kind: JAX's name of the device.
      processor: Name of the CPU.
      cores: Cores that the program may use.
      load: Processes that wanted a core in the minute before the run.
      versions: Versions of Python and the libraries.
      settings: The flags.
      peaks: Rates of the matrix product.
      rows: The measurements.
      skipped: Sentences on what was not measured, and why.
    """

    platform: str
    device_kind: str
    processor: str
    cores: int
    load: float
    versions: dict[str, str]
    settings: dict[str, Any]
    peaks: list[ProductRate] = field(default_factory=list)
    rows: list[PassTiming] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass
class Compiled:
    """Steps compiled for a GPU.

    Attributes:
      platform: Name of the GPU.
      jax: Version of JAX.
      cases: A dictionary a step: its shape, seconds, bytes of memory, bytes kept for
        the backward pass by dtype, kernels by kind.
      skipped: Sentences on what did not compile, and why.
    """

    platform: str
    jax: str
    cases: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
