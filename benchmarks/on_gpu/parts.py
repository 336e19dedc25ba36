"""The parts of `benchmarks.on_gpu`, in order of worth."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple


class Part(NamedTuple):
    """A part.

    Attributes:
      name: Name of its module in `benchmarks.on_gpu`, whose `measure` is run.
      seconds: Its share of the time, where all parts' are added up.
      needs: Packages beside jax, optax and NumPy.
      memory: JAX's share of the GPU's memory, which leaves enough for PyTorch's arrays
        where those are in the same process.
    """

    name: str
    seconds: int
    needs: tuple[str, ...] = ()
    memory: float = 0.9

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        needed = ("jax", "optax", *self.needs)
        return [name for name in needed if importlib.util.find_spec(name) is None]


MODEL = "flax", "tokenizers"
BESIDE_TORCH = 0.6

PARTS = (
    # Most of its share is for a cold start; what is left goes to the others.
    Part("facts", 40),
    Part("right", 90, ("pytest", "hypothesis")),
    Part("fast", 70, memory=BESIDE_TORCH),
    Part("optimizer", 120, MODEL),
    Part("model", 90, MODEL),
    Part("peer", 60, (*MODEL, "torch", "transformers"), BESIDE_TORCH),
    Part("learning", 30, MODEL),
)
