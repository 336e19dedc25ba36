"""The flags of `python -m benchmarks.convergence`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro

from benchmarks.convergence.arms import ARMS
from benchmarks.convergence.run import Freeze, Shared


@dataclasses.dataclass(frozen=True)
class Config:
    """Compares 1-bit Adam and its variants with Adam."""

    shared: tyro.conf.OmitArgPrefixes[Shared] = dataclasses.field(
        default_factory=Shared
    )
    out: Path = Path("docs/convergence")
    """The JSON and the picture, without their suffixes."""
    page: Path | None = None
    """The Markdown page between whose marks, named as the JSON, the tables go."""
    runs: Path = Path("runs/convergence")
    """Folder for the runs' checkpoints and weights."""
    arms: tuple[str, ...] = ARMS
    """Names of the optimizers, Adam's among them."""
    learning_rates: tuple[float, ...] = (5e-4, 7e-4, 1e-3, 1.5e-3)
    """The grid that Adam and 1-bit Adam are tuned on, with the first seed."""
    seeds: tuple[int, ...] = (3, 4, 5)
    """Each decides the parameters, the samples and their order; others than those by
    which 1-bit Adam's defaults were chosen."""
    workers: int = 8
    """Virtual devices."""
    freeze_step: int = 300
    """Steps of the warm-up."""
    more_workers: tuple[int, ...] = (16, 32)
    """Other numbers of workers, for Adam and 1-bit Adam, with the first seed."""
    freezes: tuple[Freeze, ...] = (30, 75, 150, 450, "auto")
    """Other freeze steps, with the first seed; auto: once the variance is stable."""
