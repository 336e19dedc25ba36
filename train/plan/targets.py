"""GPUs by name: how fast they are, how much they hold, and what XLA must know.

The speeds are effective ones, shares of the datasheet's: 40 % of its dense bfloat16
FLOP/s, which well-tuned training of large transformers reaches (the V100's are
measured), 80 % of its memory bandwidth, 80 % of one direction of NVLink or PCIe. Where
you have measured a step, `--compute-ms` and `--optimizer-ms` replace them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple


class Chip(NamedTuple):
    """A GPU as XLA must know it to compile for it, beside its memory.

    Attributes:
      capability: Its compute capability.
      cores: Streaming multiprocessors.
      clock: GHz.
      cache: Bytes of its second-level cache.
      shared: Bytes of shared memory of a core.
    """

    capability: tuple[int, int]
    cores: int
    clock: float
    cache: int
    shared: int


class Gpu(NamedTuple):
    """A GPU, by its datasheet.

    Attributes:
      label: Its name in full.
      teraflops: Dense bfloat16 TFLOP/s.
      terabytes: TB/s from and to its memory.
      link: GB/s that it sends to other GPUs of its host.
      gigabytes: GB that it holds.
      chip: What XLA must know; None where it cannot compile for it.
      measured: FLOP/s of a training step, and where they were measured.
    """

    label: str
    teraflops: float
    terabytes: float
    link: float
    gigabytes: float
    chip: Chip | None = None
    measured: tuple[float, str] | None = None

    @property
    def flops(self) -> float:
        """FLOP/s of a training step in half precision."""
        return self.measured[0] if self.measured else 0.4 * self.teraflops * 1e12

    @property
    def memory_rate(self) -> float:
        """Bytes a second from and to its memory."""
        return 0.8 * self.terabytes * 1e12

    @property
    def inside_rate(self) -> float:
        """Bytes a second it sends to other GPUs of its host."""
        return 0.8 * self.link * 1e9

    @property
    def memory(self) -> float:
        """Bytes it holds."""
        return self.gigabytes * 1e9

    @property
    def source(self) -> str:
        """Where the numbers come from."""
        if self.measured:
            return (
                f"FLOP/s from {self.measured[1]}; datasheet: {self.terabytes:g} TB/s "
                f"and NVLink of {self.link:g} GB/s of which 80 %"
            )
        return (
            f"datasheet: {self.teraflops:g} TFLOP/s dense bfloat16 of which 40 %, "
            f"{self.terabytes:g} TB/s and a link of {self.link:g} GB/s of which 80 %"
        )

    @property
    def target(self) -> str:
        """A `GpuTargetConfigProto` with 64 K registers a core and CUDA 13, as text."""
        assert self.chip
        (major, minor), cores, clock, cache, shared = self.chip
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.terabytes * 1e12:.0f} l2_cache_size: {cache}
  clock_rate_ghz: {clock} device_memory_size: {self.memory:.0f}
  shared_memory_per_block_optin: {shared - 1024}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "NVIDIA {self.label.split()[0]}"
"""


AMPERE = Chip((8, 0), cores=108, clock=1.41, cache=41943040, shared=167936)
HOPPER = Chip((9, 0), cores=132, clock=1.98, cache=52428800, shared=233472)
PROFILE = (
    "16 sequences of BERT-Large in 96 ms, the single host in the 1-bit Adam paper's "
    "profile"
)

GPUS = MappingProxyType(
    {
        # CUDA 13 compiles for nothing before Turing.
        "v100": Gpu("V100", 125, 0.9, 150, 32, measured=(40e12, PROFILE)),
        "a100": Gpu("A100 80 GB", 312, 2.039, 300, 80, AMPERE),
        "h100": Gpu("H100 SXM", 989, 3.35, 450, 80, HOPPER),
        "h200": Gpu("H200 SXM", 989, 4.8, 450, 141, HOPPER._replace(cache=62914560)),
        "l40s": Gpu("L40S (PCIe 4)", 362, 0.864, 32, 48),
        "rtx4090": Gpu("RTX 4090 (PCIe 4)", 165, 1.008, 32, 24),
    }
)
"""The GPUs by the names that `--gpu` takes."""
