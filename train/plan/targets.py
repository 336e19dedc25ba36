"""GPUs by name: how fast they are, how much they hold, and what XLA must know.

The speeds are effective ones, shares of the datasheet's: 40 % of its dense bfloat16
FLOP/s, which well-tuned training of large transformers reaches (the V100's are
measured), 80 % of its memory bandwidth, 80 % of one direction of NVLink or PCIe. Where
you have measured a step, `--compute-ms` and `--optimizer-ms` replace them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

_FLOPS_SHARE, _BYTES_SHARE = 0.4, 0.8


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
      label: Its name in full.
      flops: FLOP/s of a training step in half precision.
      memory_rate: Bytes a second from and to its memory.
      inside_rate: Bytes a second it sends to other GPUs of its host.
      memory: Bytes it holds.
      source: Where the numbers come from.
      target: What XLA compiles for, a protobuf text; '' where it cannot.
    """

    label: str
    flops: float
    memory_rate: float
    inside_rate: float
    memory: float
    source: str
    target: str


def _datasheet(
    label: str,
    *,
    teraflops: float,
    terabytes: float,
    link: float,
    gigabytes: float,
    target: str = "",
) -> Gpu:
    return Gpu(
        label,
        _FLOPS_SHARE * teraflops * 1e12,
        _BYTES_SHARE * terabytes * 1e12,
        _BYTES_SHARE * link * 1e9,
        gigabytes * 1e9,
        f"datasheet: {teraflops:g} TFLOP/s dense bfloat16 of which 40 %, "
        f"{terabytes:g} TB/s and a link of {link:g} GB/s of which 80 %",
        target,
    )


def _target(
    label: str,
    *,
    capability: tuple[int, int],
    cores: int,
    clock: float,
    bandwidth: int,
    memory: int,
    cache: int,
    shared: int,
) -> str:
    """A `GpuTargetConfigProto` of a GPU with 64 K registers a core and CUDA 13."""
    major, minor = capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory} shared_memory_per_block_optin: {shared - 1024}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "NVIDIA {label}"
"""


GPUS = MappingProxyType(
    {
        "v100": Gpu(
            "V100",
            40e12,
            _BYTES_SHARE * 0.9e12,
            _BYTES_SHARE * 150e9,
            32e9,
            "FLOP/s from 16 sequences of BERT-Large in 96 ms, the single host in the "
            "1-bit Adam paper's profile; datasheet: 0.9 TB/s and NVLink of 150 GB/s of "
            "which 80 %",
            "",  # CUDA 13 compiles for nothing before Turing.
        ),
        "a100": _datasheet(
            "A100 80 GB",
            teraflops=312,
            terabytes=2.039,
            link=300,
            gigabytes=80,
            target=_target(
                "A100",
                capability=(8, 0),
                cores=108,
                clock=1.41,
                bandwidth=2039000000000,
                memory=80000000000,
                cache=41943040,
                shared=167936,
            ),
        ),
        "h100": _datasheet(
            "H100 SXM",
            teraflops=989,
            terabytes=3.35,
            link=450,
            gigabytes=80,
            target=_target(
                "H100",
                capability=(9, 0),
                cores=132,
                clock=1.98,
                bandwidth=3350000000000,
                memory=80000000000,
                cache=52428800,
                shared=233472,
            ),
        ),
        "h200": _datasheet(
            "H200 SXM",
            teraflops=989,
            terabytes=4.8,
            link=450,
            gigabytes=141,
            target=_target(
                "H200",
                capability=(9, 0),
                cores=132,
                clock=1.98,
                bandwidth=4800000000000,
                memory=141000000000,
                cache=62914560,
                shared=233472,
            ),
        ),
        "l40s": _datasheet(
            "L40S (PCIe 4)", teraflops=362, terabytes=0.864, link=32, gigabytes=48
        ),
        "rtx4090": _datasheet(
            "RTX 4090 (PCIe 4)", teraflops=165, terabytes=1.008, link=32, gigabytes=24
        ),
    }
)
"""The GPUs by the names that `--gpu` takes."""
