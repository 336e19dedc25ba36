"""The operations of NumPy, and of PyTorch, to compare with."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from benchmarks.kernels.inputs import WORKERS
from benchmarks.kernels.operations import DECAY, EPS, Operation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.kernels.operations import Call


def numpy_operations(size: int) -> Iterator[Operation]:
    """NumPy's packing and unpacking."""

    def pack() -> Call:
        x = np.random.default_rng(0).standard_normal(size, np.float32)
        return lambda: np.packbits(x >= 0)

    def unpack() -> Call:
        bits = np.random.default_rng(0).integers(0, 256, -(-size // 8), np.uint8)
        return lambda: np.unpackbits(bits, count=size)

    yield Operation("packbits(x >= 0)", "fresh", "numpy", pack)
    yield Operation("unpackbits", "fresh", "numpy", unpack)


def why_no_torch() -> str | None:
    """The reason why PyTorch cannot be compared with; None where it can."""
    if importlib.util.find_spec("torch") is None:
        return "not compared with torch: not installed"
    if jax.default_backend() != "gpu":
        return "not compared with torch: no GPU"
    try:
        torch = importlib.import_module("torch")
    # PyTorch's errors are reported, and end nothing.
    except Exception as error:
        return f"not compared with torch: {error}"
    return None if torch.cuda.is_available() else "not compared with torch: sees no GPU"


def torch_operations(ours: list[Operation], size: int) -> Iterator[Operation]:
    """The arithmetic as DeepSpeed's NCCL backend does it.

    Elementwise operations of PyTorch one by one, one scale a buffer, and the signs
    packed by CuPy; where that is not installed, by PyTorch.

    Args:
      ours: The operations whose baselines they are measured beside.
      size: Values of a buffer.

    Yields:
      Each operation.

    References:
      DeepSpeed 0.19.6, deepspeed/runtime/comm/nccl.py,
      deepspeed/runtime/fp16/onebit/adam.py.
    """
    # Not in any of the extras: a type checker does not know them.
    torch = importlib.import_module("torch")
    name, packing = "torch", _PackingByTorch(torch)
    if importlib.util.find_spec("cupy"):
        name = "torch and cupy"
        packing = _PackingByCupy(torch, importlib.import_module("cupy"))
    baselines = {each.name: each.baseline for each in ours if each.buffers == "donated"}
    baselines["step"] = baselines["step, one jit"]
    for operation in (
        "compress with momentum",
        "average and recompress",
        "decompress and apply",
        "step",
    ):
        yield Operation(
            operation,
            "donated",
            name,
            functools.partial(torch_call, torch, packing, "cuda", operation, size),
            baselines[operation],
            lambda _: torch.cuda.synchronize(),
        )


class _PackingByCupy:
    """Bits of bytes of zero and one, on the GPU, as DeepSpeed packs them."""

    def __init__(self, torch: Any, cupy: Any):
        self.torch, self.cupy = torch, cupy

    def pack(self, bits: Any) -> Any:
        packed = self.cupy.packbits(self.cupy.from_dlpack(bits))
        return self.torch.from_dlpack(packed)

    def unpack(self, packed: Any) -> Any:
        bits = self.cupy.unpackbits(self.cupy.from_dlpack(packed))
        return self.torch.from_dlpack(bits)


class _PackingByTorch:
    """The same bits by PyTorch's own operations."""

    def __init__(self, torch: Any):
        self.torch = torch

    def _shifts(self, like: Any) -> Any:
        return self.torch.arange(7, -1, -1, dtype=like.dtype, device=like.device)

    def pack(self, bits: Any) -> Any:
        shifted = bits.view(-1, 8) << self._shifts(bits)
        return shifted.sum(1, dtype=self.torch.uint8)

    def unpack(self, packed: Any) -> Any:
        return ((packed[:, None] >> self._shifts(packed)) & 1).flatten()


class _Arithmetic:
    """DeepSpeed's arithmetic on signs."""

    def __init__(self, torch: Any, packing: Any):
        self.torch, self.packing = torch, packing

    def quantise(self, x: Any, error: Any) -> tuple[Any, Any]:
        scale = self.torch.norm(x) / np.sqrt(x.numel())
        sign = x.sign().add_(1).bool().float().add_(-0.5).mul_(2.0)
        error.set_(x - scale * sign)
        bits = x.sign_().add_(1).bool().to(self.torch.uint8)
        return self.packing.pack(bits), scale

    def unpack(self, bits: Any, scales: Any) -> Any:
        signs = self.packing.unpack(bits)
        return signs.reshape(WORKERS, -1).float().add_(-0.5).mul_(2.0).mul_(scales)


def torch_call(
    torch: Any, packing: Any, device: str, operation: str, size: int
) -> Call:
    """The call of one of the operations with PyTorch."""
    padded = -(-size // (8 * WORKERS)) * 8 * WORKERS
    share = padded // WORKERS
    signs = _Arithmetic(torch, packing)

    def normal(count: int) -> Any:
        return torch.randn(count, device=device)

    gradient, momentum, error = (normal(padded) for _ in range(3))
    server_error, nu = normal(share), normal(padded).square()
    received, agreed = (
        torch.randint(0, 256, (padded // 8,), dtype=torch.uint8, device=device)
        for _ in range(2)
    )
    scales = torch.rand(WORKERS, 1, device=device)

    def compress() -> Any:
        momentum.mul_(DECAY).add_(gradient, alpha=1 - DECAY)
        momentum.add_(error)
        return signs.quantise(momentum, error)

    def average() -> Any:
        y = signs.unpack(received, scales / WORKERS).sum(0)
        return signs.quantise(y.add_(server_error), server_error)

    def apply() -> Any:
        momentum.copy_(signs.unpack(agreed, scales).flatten())
        return momentum / (nu.sqrt() + EPS)

    return {
        "compress with momentum": compress,
        "average and recompress": average,
        "decompress and apply": apply,
        "step": lambda: (compress(), average(), apply()),
    }[operation]
