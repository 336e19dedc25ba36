"""The sizes of everything that is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchmarks.kernels.inputs import ADAM, DEFAULT, STEP

if TYPE_CHECKING:
    from models.config import Attention

BLOCK_SIZE = 1024


@dataclass(frozen=True)
class Sizes:
    """Sizes, by default those of a GPU.

    Attributes:
      platform: JAX's name of the platform.
      mosaic: The implementation of `pallas_kernels` that is looked at, beside XLA's.
      dtype: Of the matrix product and of the model.
      product: Rows and columns of the matrix product's factors.
      tests: Tests of the kernels that are run, an expression for pytest's `-k`.
      kernels: Values of the buffers that operations are timed on.
      operations: Names of `benchmarks.kernels`.
      repeats: Timed rounds.
      calls: Calls of a round.
      model: Size of the BERT.
      lengths: Tokens of its sequences.
      tokens: Tokens of a batch.
      attentions: Implementations of its attention.
      leaves: Shapes of the optimizer's parameters; None for those of that model.
      forms: Forms of the optimizer: the default, and as published.
    """

    platform: str = "gpu"
    mosaic: str = "mosaic"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    product: int = 8192
    tests: str = ""
    kernels: tuple[int, ...] = (100 * 2**20, 320 * 2**20)
    operations: tuple[str, ...] = (
        ADAM,
        "compress with momentum",
        "average and recompress",
        "compress",
        "decompress",
        "decompress and apply",
        STEP,
        DEFAULT,
    )
    repeats: int = 9
    calls: int = 10
    model: str = "large"
    lengths: tuple[int, ...] = (128, 512)
    tokens: int = 16384
    attentions: tuple[Attention, ...] = ("xla", "cudnn")
    leaves: tuple[tuple[int, ...], ...] | None = None
    forms: tuple[Literal["default", "published"], ...] = ("default", "published")


SIZES = Sizes()

TINY = Sizes(
    platform="cpu",
    mosaic="mosaic_interpreted",
    dtype="float32",
    product=512,
    tests="numbers_that_are_hard",
    kernels=(4096,),
    operations=(ADAM, "compress with momentum"),
    repeats=1,
    calls=1,
    model="tiny",
    lengths=(16,),
    tokens=32,
    leaves=((32, 128), (32,)),
    forms=("published",),
)
