"""The sizes of everything that is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from models.config import Attention

Form = Literal["default", "published"]

BLOCK_SIZE = 1024
STEPS = "step, one jit", "step and parameters, one jit"


@dataclass(frozen=True)
class Sizes:
    """Sizes, by default those of a GPU.

    Attributes:
      platform: JAX's name of the platform.
      mosaic: The implementation of `pallas_kernels` that is looked at, beside XLA's.
      copies: Values of the arrays that are copied.
      dtype: Of the matrix product and of the model.
      tests: Tests of the kernels that are run, an expression for pytest's `-k`.
      kernels: Values of the buffers that operations are timed on.
      operations: Names of `benchmarks.kernels`.
      repeats: Timed rounds.
      calls: Calls of a round.
      model: Size of the BERT.
      lengths: Tokens of its sequences.
      batch: Sequences of a step; None for as many as have 16,384 tokens.
      attentions: Implementations of its attention.
      peers: Forms of PyTorch that it is compared with.
      leaves: Shapes of the optimizer's parameters; None for those of that model.
      forms: Forms of the optimizer: the default, and as published.
      workers: Workers that one device simulates for the optimizer.
      study: Plan of the study in `docs/studies`.
      steps: Steps of its runs; None for the plan's.
      corpus: Text of the study, files of `docs`; default: Python's documentation.
    """

    platform: str = "gpu"
    mosaic: str = "mosaic"
    copies: tuple[int, ...] = (2**20, 2**24, 100 * 2**20, 320 * 2**20)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    tests: str = ""
    kernels: tuple[int, ...] = (100 * 2**20, 320 * 2**20)
    operations: tuple[str, ...] = (
        "Adam's update",
        "compress with momentum",
        "average and recompress",
        "compress",
        "decompress",
        "decompress and apply",
        *STEPS,
        "step",
    )
    repeats: int = 9
    calls: int = 10
    model: str = "large"
    lengths: tuple[int, ...] = (128, 512)
    batch: int | None = None
    attentions: tuple[Attention, ...] = ("xla", "cudnn")
    peers: tuple[Literal["eager", "compiled"], ...] = ("compiled",)
    leaves: tuple[tuple[int, ...], ...] | None = None
    forms: tuple[Form, ...] = ("default", "published")
    workers: int = 4
    study: str = "on-gpu"
    steps: int | None = None
    corpus: tuple[str, ...] = ()


SIZES = Sizes()

TINY = Sizes(
    platform="cpu",
    mosaic="mosaic_interpreted",
    copies=(2**16,),
    dtype="float32",
    tests="numbers_that_are_hard",
    kernels=(4096,),
    operations=("Adam's update", "compress with momentum"),
    repeats=1,
    calls=1,
    model="tiny",
    lengths=(16,),
    batch=2,
    attentions=("xla", "cudnn"),
    peers=("eager",),
    leaves=((32, 128), (32,)),
    forms=("published",),
    workers=2,
    steps=4,
    corpus=("convergence.md", "multi-host.md", "bert.md", "plan.md"),
)
