"""`python -m train.plan`: is 1-bit Adam worth it on my cluster, and in which topology?

    python -m train.plan --model large --hosts 16 --gpus 4 --gpu v100 --rate 4.1 \
      --rate-is measured

prints what a step costs with each optimizer, by the formulas of `train.plan.model`;
`docs/plan.md` says what they assume and how they compare with measured clusters.
`--compile` compiles the whole step for that many GPUs, without any, and prints what
it holds and sends.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jax
import tyro

from train.bert.objective import abstract_params
from train.core.errors import InputError, writable
from train.plan.compile import check_compiler, compile_step, describe
from train.plan.model import Load, Model, bert_flops, dense_flops, load
from train.plan.report import GIGABIT, make_plan, milliseconds, table, to_json, verdict
from train.plan.sizes import SIZES
from train.plan.targets import GPUS
from train.plan.wire import Cluster, lines_of

if TYPE_CHECKING:
    from collections.abc import Sequence

GpuName = Literal["v100", "a100", "h100", "h200", "l40s", "rtx4090"]

HELD_BYTES = 20
"""Of a parameter on its GPU: itself, gradient, momentum, variance and worker error."""

SHORT = 5e-3
"""Seconds of a micro-batch under which its kernels' starts are not small beside it."""


@dataclass(frozen=True)
class PlanConfig:
    """Predicts what 1-bit Adam gains on a cluster."""

    rate: float
    """Gbit/s that a host sends to others, all its network cards together."""
    rate_is: Literal["measured", "nominal"] = "nominal"
    """Whether --rate was measured (iperf between two hosts) or is the nominal one."""
    model: str = "large"
    """A BERT by name (tiny, mini, small, medium, base, large, 7b), or a number of
    parameters, as 1.5e9."""
    hosts: int = 8
    """Hosts."""
    gpus: int = 8
    """GPUs a host."""
    gpu: GpuName = "h200"
    """What the GPUs are."""
    inside_rate: float | None = None
    """Gbit/s that a GPU sends to others of its host; default: 80 % of its NVLink's, or
    PCIe's, nominal rate."""
    latency_us: float = 20.0
    """Microseconds of a message between hosts, beside its bytes."""
    batch: int = 16
    """Sequences a GPU and micro-batch."""
    accumulate: int = 1
    """Micro-batches a step."""
    seq: int = 128
    """Tokens a sequence."""
    compute_ms: float | None = None
    """Measured milliseconds of a micro-batch's forward and backward pass; default: from
    the GPU's FLOP/s."""
    optimizer_ms: float | None = None
    """Measured milliseconds of Adam's update; default: from the GPU's memory."""
    overlap: float = 0.0
    """Share of the last backward pass behind which an exact exchange hides."""
    remat: bool = False
    """Recompute the layers in the backward pass, for less memory."""
    warmup: float = 0.15
    """Share of the steps before the freeze."""
    warmup_gradients: Literal["float32", "bfloat16"] = "float32"
    """What 1-bit Adam's warm-up exchanges; train.pretrain's is float32."""
    compile: bool = False
    """Compile the whole training step for these GPUs, without any, and say what it
    holds and sends."""
    topology: Literal["auto", "flat", "hierarchical"] = "auto"
    """What is compiled: hierarchical where hosts have several GPUs, else flat."""
    wire: Literal["signs", "counts"] = "signs"
    """What is compiled: the exchange of signs or of counts."""
    fsdp: bool = False
    """What is compiled: parameters, moments and errors sharded over the GPUs of a host,
    each shard compressed between hosts."""
    json: Path | None = None
    """Where all numbers go."""


def check(config: PlanConfig) -> None:
    """Refuses what no cluster has.

    Raises:
      InputError: A flag's value is out of its range.
    """
    for name in ("hosts", "gpus", "batch", "accumulate", "seq"):
        if getattr(config, name) < 1:
            raise InputError(f"--{name} must be at least 1.")
    for name in ("rate", "inside_rate", "compute_ms", "optimizer_ms"):
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} must be a positive number, not {value}.")
    if not 0 <= config.latency_us < math.inf:
        raise InputError(f"--latency-us must not be negative, got {config.latency_us}.")
    if config.compile:
        check_compiler(config)
    else:
        for name in ("topology", "wire", "fsdp"):
            if getattr(config, name) != getattr(PlanConfig(rate=1), name):
                raise InputError(
                    f"--{name} chooses what is compiled; add --compile, or leave it "
                    "out: the table has every form."
                )
    for name in ("warmup", "overlap"):
        if not 0 <= getattr(config, name) <= 1:
            raise InputError(f"--{name} is a share, from 0 to 1.")


def model_of(config: PlanConfig) -> Model:
    """The model that the flags name.

    Raises:
      InputError: There is no such model.
    """
    if config.model in SIZES:
        sizes = SIZES[config.model]
        if config.seq > sizes.max_positions:
            raise InputError(
                f"--seq must be at most {sizes.max_positions}, the positions of BERT "
                f"{config.model}."
            )
        leaves = jax.tree.leaves(abstract_params(sizes))
        lines = sum(lines_of(leaf.shape) for leaf in leaves)
        flops = bert_flops(sizes, config.seq, remat=config.remat)
        own = tuple(leaf.size for leaf in leaves)
        return Model(f"BERT {config.model}", own, flops, lines)
    try:
        parameters = round(float(config.model))
    except (ValueError, OverflowError):
        parameters = 0
    if parameters < 1:
        raise InputError(
            f"--model must be one of {', '.join(SIZES)} or a number of parameters, not "
            f"{config.model}."
        )
    flops = dense_flops(parameters, config.seq) * (4 / 3 if config.remat else 1)
    return Model(f"{parameters:,} parameters", (parameters,), flops)


def cluster_of(config: PlanConfig) -> Cluster:
    """The cluster that the flags describe."""
    inside = config.inside_rate
    return Cluster(
        config.hosts,
        config.gpus,
        config.rate * GIGABIT,
        GPUS[config.gpu].inside_rate if inside is None else inside * GIGABIT,
        config.latency_us / 1e6,
    )


def load_of(config: PlanConfig, model: Model) -> Load:
    """What a GPU computes, measured where it was."""
    gpu = GPUS[config.gpu]
    found = load(
        model,
        batch=config.batch,
        accumulate=config.accumulate,
        flops=gpu.flops,
        memory_rate=gpu.memory_rate,
        overlap=config.overlap,
    )
    if config.compute_ms is not None:
        found = found._replace(micro_batch=config.compute_ms / 1e3)
    if config.optimizer_ms is not None:
        found = found._replace(adam=config.optimizer_ms / 1e3)
    return found


def heading(config: PlanConfig, model: Model, cluster: Cluster, work: Load) -> str:
    """What the answer is given for."""
    gpu, measured = GPUS[config.gpu], config.compute_ms is not None
    lines = [
        f"{model.name} ({model.parameters:,} parameters), {config.seq} tokens, batch "
        f"{config.batch} x {config.accumulate} a GPU",
        f"{config.hosts} x {config.gpus} {gpu.label}, "
        f"{config.rate:g} Gbit/s between hosts ({config.rate_is}), "
        f"{cluster.inside_rate / GIGABIT:,.0f} Gbit/s a GPU inside",
        f"a micro-batch takes {milliseconds(work.micro_batch)} ms "
        f"({'measured' if measured else 'predicted'})",
    ]
    if not measured:
        lines.append(f"{gpu.label}: {gpu.source}")
    if not measured and work.micro_batch < SHORT:
        lines.append(
            "A micro-batch this short is bound by starting kernels, which is not "
            "predicted; measure one and give --compute-ms."
        )
    held = HELD_BYTES * model.parameters
    if held > gpu.memory and not config.fsdp:
        lines.append(
            f"Parameters, gradients, moments and errors take {held / 1e9:,.0f} GB, and "
            f"a GPU has {gpu.memory / 1e9:,.0f}: this holds where they are sharded "
            "inside each host."
        )
    if config.rate_is == "nominal" and config.hosts > 1:
        lines.append(
            "The link rate is nominal; measure it (iperf3 between two hosts): on the "
            "1-bit Adam paper's 40 Gbit/s Ethernet it was 4.1."
        )
    return "\n".join(lines)


def run(config: PlanConfig) -> None:
    """Answers on the terminal, and in a file where one is named.

    Args:
      config: The flags.

    Raises:
      InputError: They cannot be used.
    """
    check(config)
    if config.json is not None:
        with writable(config.json, "--json"):  # not only after minutes of compiling
            config.json.open("a").close()
    model, cluster = model_of(config), cluster_of(config)
    work = load_of(config, model)
    plan = make_plan(
        model,
        work,
        cluster,
        warmup_share=config.warmup,
        warmup_itemsize=4 if config.warmup_gradients == "float32" else 2,
    )
    print(heading(config, model, cluster, work))
    print(f"\n{table(plan)}\n\n{verdict(plan)}")
    answer = to_json(plan) | {"rate_is": config.rate_is, "gpu": config.gpu}
    if config.compile:
        answer["compiled"] = compile_step(config)
        print(f"\n{describe(answer['compiled'], config)}")
    if config.json is not None:
        config.json.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; a mistake in it ends in one sentence."""
    try:
        run(tyro.cli(PlanConfig, args=arguments, prog="python -m train.plan"))
    except InputError as error:
        raise SystemExit(f"error: {error}") from error
