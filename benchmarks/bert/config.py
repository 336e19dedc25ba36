"""The flags of `python -m benchmarks.bert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.config import SIZES, Attention, Remat
from train.core.errors import InputError, writable

Pass = Literal["forward", "backward", "step"]


@dataclass(frozen=True)
class Config:
    """Times or compiles BERT's training step."""

    models: tuple[str, ...] = ()
    """Sizes by name; default: mini, on a GPU large."""
    seqs: tuple[int, ...] = (128, 512)
    """Tokens of a sequence."""
    batch: int | None = None
    """Sequences of a batch; default: as many as have 1024 tokens, on a GPU 16384."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the computation; default: float32, on a GPU bfloat16."""
    attentions: tuple[Attention, ...] = ()
    """Implementations of attention; default: xla, on a GPU xla and cudnn."""
    remats: tuple[Remat, ...] = ("none",)
    """The layers' parts that the backward pass recomputes."""
    scan: bool = True
    """Whether the layers are one loop, which compiles in the time of one of them."""
    passes: tuple[Pass, ...] = ("forward", "backward", "step")
    """Passes that are timed."""
    optimizer: Literal["adam", "onebit_adam"] = "adam"
    """The step's optimizer."""
    peers: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")
    """Forms of PyTorch that are measured where it is installed."""
    repeats: int = 7
    """Rounds."""
    calls: int | None = None
    """Calls that are timed together; default: 1, on a GPU 5."""
    compile: Literal["h100", "h200"] | None = None
    """A GPU to compile for instead of measuring."""
    json: Path | None = None
    """Where the results go."""
    page: Path | None = None
    """The Markdown page between whose marks the table goes."""


def check(config: Config) -> None:
    """Refuses what cannot be measured.

    Raises:
      InputError: A flag's value cannot be used.
    """
    unknown = [name for name in config.models if name not in SIZES]
    if unknown:
        raise InputError(f"--models knows {', '.join(SIZES)}, not {unknown[0]}.")
    counts = [config.repeats, *config.seqs, *(config.batch, config.calls)]
    if not config.seqs or min(n for n in counts if n is not None) < 1:
        raise InputError("--seqs, --batch, --repeats and --calls must be at least 1.")
    if not config.passes or not config.remats:
        raise InputError("--passes and --remats need one at least.")
    if config.json:
        with writable(config.json, "--json"):
            config.json.open("a").close()
    if config.page and not config.page.is_file():
        raise InputError(f"--page {config.page}: there is no such file.")
