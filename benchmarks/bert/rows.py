"""What `benchmarks.bert` has measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One pass of one implementation.

    Attributes:
      model: A size by name.
      length: Tokens of a sequence.
      batch: Sequences.
      dtype: Name of the dtype that is computed in.
      implementation: Whose.
      attention: Which.
      remat: What the backward pass recomputes.
      predictions: Positions of a sequence that are projected to the vocabulary.
      name: 'forward', 'backward' or 'step'.
      seconds: Of a call, a round each.
      milliseconds: Their first quartile, median and third quartile.
      examples_per_second: Sequences, at the median.
      flops: Of a call.
      tflops_per_second: At the median.
      of_peak: Share of the matrix product's, at the medians.
      speed_up: Quartiles of the baseline's time over this one's, round by round.
      held_bytes: Arguments, temporaries and results of its program, where known.
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
class Peak:
    """The matrix product of the same rounds.

    Attributes:
      model: The size it was measured beside.
      length: Tokens of a sequence.
      dtype: Name of the dtype.
      size: Rows and columns of its square factors.
      baseline: What `speed_up` of these rounds' rows is measured against.
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
    """What was measured, and where.

    Attributes:
      platform: JAX's.
      device_kind: JAX's.
      processor: Name of the CPU.
      cores: That the program may use.
      load: Processes that wanted a core in the minute before the run.
      versions: Of Python and the libraries.
      settings: The flags.
      peaks: Of the matrix product.
      rows: The measurements.
      skipped: What was not measured, and why.
    """

    platform: str
    device_kind: str
    processor: str
    cores: int
    load: float
    versions: dict[str, str]
    settings: dict[str, Any]
    peaks: list[Peak] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
