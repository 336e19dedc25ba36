"""The flags of `python -m train.plan`, and the models that it knows by name."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import jax

import models
from train.core.errors import InputError
from train.core.exchange import ExchangeName
from train.core.flags import Count, NotNegative, Positive, Range, check_ranges
from train.core.optimizer import OPTIMIZERS
from train.plan.targets import GPUS

SIZES = MappingProxyType(
    {
        **models.SIZES,
        "7b": replace(
            models.SIZES["large"],
            hidden_size=5120,
            num_layers=25,
            num_heads=40,
            intermediate_size=16384,
        ),
    }
)
"""BERT's sizes, and the same much larger, by the names that `--model` takes."""

INSTALL = (
    "--compile needs XLA's compiler for NVIDIA GPUs, but no GPU: pip install --no-deps "
    "jax-cuda13-plugin=={0} jax-cuda13-pjrt=={0} nvidia-cuda-nvcc nvidia-nvvm "
    "nvidia-cuda-crt nvidia-cuda-runtime (700 MB)."
)

Share = Annotated[float, Range(least=0, most=1)]
GpuName = Literal["v100", "a100", "h100", "h200", "l40s", "rtx4090"]

COMPILED_ONLY = "topology", "exchange", "fsdp"
"""Flags that choose what is compiled."""


@dataclass(frozen=True)
class PlanConfig:
    """Predicts what 1-bit Adam gains on a cluster."""

    rate: Positive
    """Gbit/s that a host sends to others, all its network cards together."""
    rate_is: Literal["measured", "nominal"] = "nominal"
    """The kind of --rate: measured (iperf between two hosts) or nominal."""
    model: str = "large"
    """A BERT by name (tiny, mini, small, medium, base, large, 7b), or a number of
    parameters, as 1.5e9."""
    hosts: Count = 8
    """Hosts."""
    gpus: Count = 8
    """GPUs a host."""
    gpu: GpuName = "h200"
    """The kind of GPU."""
    inside_rate: Positive | None = None
    """Gbit/s that a GPU sends to others of its host; default: 80 % of its NVLink's, or
    PCIe's, nominal rate."""
    latency_us: NotNegative = 20.0
    """Microseconds of a message between hosts, beside its bytes."""
    batch: Count = 16
    """Sequences a GPU and micro-batch; the --batch of train's commands is that of all
    GPUs together."""
    accumulate: Count = 1
    """Micro-batches a step."""
    seq: Count = 128
    """Tokens a sequence."""
    compute_ms: Positive | None = None
    """Measured milliseconds of a micro-batch's forward and backward pass; default: from
    the GPU's FLOP/s."""
    optimizer_ms: Positive | None = None
    """Measured milliseconds of Adam's update; default: from the GPU's memory."""
    overlap: Share = 0.0
    """Share of the last backward pass behind which an exact exchange hides."""
    remat: bool = False
    """Recompute the layers in the backward pass, for less memory."""
    warmup: Share = OPTIMIZERS["onebit_adam"].freeze
    """Share of the steps before the freeze, which send 8 bits a value; default: that of
    1-bit Adam in train.*."""
    steps: Count | None = None
    """Steps of a run: adds a table of all optimizers, with the bytes and the hours of
    the whole run, gradients in float32; takes a minute for hundreds of leaves."""
    compile: bool = False
    """Compile the whole training step for these GPUs, without any, and say what it
    holds and sends."""
    topology: Literal["auto", "flat", "hierarchical"] = "auto"
    """To be compiled: compression by each GPU (flat), or by each host for its GPUs
    together (hierarchical); auto: hierarchical where hosts have several GPUs."""
    exchange: ExchangeName = "sign_mean"
    """To be compiled: the exchange of signs or of counts."""
    fsdp: bool = False
    """To be compiled: parameters, moments and errors sharded over the GPUs of a host,
    each shard compressed between hosts."""
    json: Path | None = None
    """Where all numbers go."""


def check(config: PlanConfig) -> None:
    """Refuses what no cluster has, or what cannot be compiled.

    Raises:
      InputError: A flag's value is out of its range, or XLA's compiler is missing.
    """
    check_ranges(config)
    if config.compile:
        _check_compiled(config)
        return
    for flag in fields(config):
        chosen = getattr(config, flag.name) != flag.default
        if flag.name in COMPILED_ONLY and chosen:
            raise InputError(
                f"--{flag.name} chooses what is compiled; add --compile, or leave it "
                "out: the table has every form."
            )


def _check_compiled(config: PlanConfig) -> None:
    if not GPUS[config.gpu].chip:
        can = ", ".join(name for name, gpu in GPUS.items() if gpu.chip)
        raise InputError(f"--compile knows the GPUs {can}, not {config.gpu}.")
    if config.model not in SIZES:
        raise InputError(f"--compile needs the shapes of one of {', '.join(SIZES)}.")
    if config.hosts == 1 or config.gpus == 1:
        if config.fsdp:
            raise InputError("--fsdp needs several hosts of several GPUs.")
        if config.topology == "hierarchical":
            raise InputError(
                "--topology hierarchical needs several hosts of several GPUs; give "
                "them, or leave it out."
            )
    if config.fsdp and config.topology == "flat":
        raise InputError(
            "--fsdp compresses between hosts alone; leave --topology flat out."
        )
    parts = "jax_plugins", "jax_plugins.xla_cuda13"
    if not all(importlib.util.find_spec(part) for part in parts):
        raise InputError(INSTALL.format(jax.__version__))
