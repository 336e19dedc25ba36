"""`python -m train.plan`: is 1-bit Adam worth it on my cluster, and in which topology?

    python -m train.plan --model large --hosts 16 --gpus 4 --gpu v100 --rate 4.1 \
      --rate-is measured

prints what a step costs with each optimizer, by the formulas of `train.plan.model`;
`docs/plan-model.md` says what they assume, `docs/notes/planner.md` how they compare
with measured clusters.
`--steps` adds whole runs of every optimizer. `--compile` compiles the whole step for
that many GPUs, without any, and prints what it holds and sends.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import tyro

from train.bert.objective import abstract_params
from train.core.errors import InputError, writable
from train.plan.advice import advice
from train.plan.cluster import GIGABIT, GpuCluster
from train.plan.compile import compile_step, describe
from train.plan.config import SIZES, PlanConfig, check
from train.plan.family import family_table, predicted_runs
from train.plan.flops import step_flops
from train.plan.model import ADAM_BYTES, GpuWork, Model
from train.plan.report import milliseconds, predict, table, to_json, verdict
from train.plan.targets import GPUS

if TYPE_CHECKING:
    from collections.abc import Sequence
HELD_BYTES = 24
"""Bytes a GPU holds for each parameter: parameter, gradient, momentum, variance and the
worker errors of both stages' exchanges, float32."""

SHORT = 5e-3
"""Seconds of a micro-batch below which starting its kernels takes a large share."""


def model_of(config: PlanConfig) -> Model:
    """A BERT, or a dense model of one leaf where a number of parameters is given.

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
        leaves = tuple(jax.tree.leaves(abstract_params(sizes)))
        flops = step_flops(sizes, config.seq, remat=config.remat)
        return Model(f"BERT {config.model}", leaves, flops)
    try:
        parameters = round(float(config.model))
    except (ValueError, OverflowError):
        parameters = 0
    if parameters < 1:
        raise InputError(
            f"--model must be one of {', '.join(SIZES)} or a number of parameters, "
            f"such as 60e6, not {config.model}."
        )
    flops = (8.0 if config.remat else 6.0) * parameters * config.seq
    leaf = jax.ShapeDtypeStruct((parameters,), jnp.float32)
    return Model("A model", (leaf,), flops)


def cluster_of(config: PlanConfig) -> GpuCluster:
    """The cluster of the flags, in bytes a second and in seconds."""
    inside = config.inside_rate
    return GpuCluster(
        config.hosts,
        config.gpus,
        config.rate * GIGABIT,
        GPUS[config.gpu].inside_rate if inside is None else inside * GIGABIT,
        config.latency_us / 1e6,
    )


def work_of(config: PlanConfig, model: Model) -> GpuWork:
    """A GPU's work, from its rates, or from measured times where they are given."""
    gpu = GPUS[config.gpu]
    micro_batch = config.batch * model.flops / gpu.flops
    if config.compute_ms is not None:
        micro_batch = config.compute_ms / 1e3
    adam = ADAM_BYTES * model.parameters / gpu.memory_rate
    if config.optimizer_ms is not None:
        adam = config.optimizer_ms / 1e3
    rate, overlap = gpu.memory_rate, config.overlap
    return GpuWork(micro_batch, config.accumulate, adam, rate, overlap)


def heading(
    config: PlanConfig, model: Model, cluster: GpuCluster, work: GpuWork
) -> str:
    """Lines above the table: what is planned, and what cannot be trusted in it."""
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
    memory = HELD_BYTES * model.parameters
    if memory <= gpu.memory and not config.fsdp:
        lines.append(
            f"parameters, gradients, moments and errors take {memory / 1e9:,.1f} GB of "
            f"a GPU's {gpu.memory / 1e9:,.0f}; activations are not counted"
        )
    elif memory <= config.gpus * gpu.memory and not config.fsdp:
        lines.append(
            f"Parameters, gradients, moments and errors take {memory / 1e9:,.0f} GB, "
            f"and a GPU has {gpu.memory / 1e9:,.0f}: this holds where they are sharded "
            "inside each host."
        )
    if config.rate_is == "nominal" and config.hosts > 1:
        lines.append(
            "The link rate is nominal; measure it (iperf3 between two hosts): on the "
            "1-bit Adam paper's 40 Gbit/s Ethernet it was 4.1."
        )
    return "\n".join(lines)


def misfit(config: PlanConfig, model: Model) -> str:
    """The sentence on a model that fits on no host; empty for one that does."""
    memory, there = HELD_BYTES * model.parameters, GPUS[config.gpu].memory * config.gpus
    if memory <= there:
        return ""
    return (
        "The model does not fit: parameters, gradients, moments and errors take "
        f"{memory / 1e9:,.0f} GB, and a host has {there / 1e9:,.0f} GB; ask again with "
        "more GPUs a host, or larger ones."
    )


def run(config: PlanConfig) -> None:
    """Prints the prediction, and writes it to a file where one is named.

    Raises:
      InputError: The flags cannot be used.
    """
    check(config)
    if config.json is not None and not config.json.parent.is_dir():
        raise InputError(f"--json {config.json} cannot be written to: no such folder.")
    model, cluster = model_of(config), cluster_of(config)
    work = work_of(config, model)
    prediction = predict(model, work, cluster, config.warmup)
    print(heading(config, model, cluster, work))
    unfit = misfit(config, model)
    said = unfit or verdict(prediction)
    to_take = "" if unfit else advice(prediction, config.steps)
    print(f"\n{table(prediction)}\n\n{said}")
    if to_take:
        print(f"\n{to_take}")
    asked = {"rate_is": config.rate_is, "gpu": config.gpu}
    answer = to_json(prediction) | asked | {"verdict": said, "advice": to_take}
    answer["pays"] = answer["pays"] and not unfit
    if config.steps is not None:
        freeze = max(1, round(config.warmup * config.steps))
        runs = predicted_runs(model, work, cluster, steps=config.steps, freeze=freeze)
        answer["whole_runs"] = [run._asdict() for run in runs]
        print(f"\n{family_table(runs, model.parameters)}")
    if config.compile:
        answer["compiled"] = compile_step(config)
        print(f"\n{describe(answer['compiled'], config)}")
    if config.json is not None:
        with writable(config.json, "--json"):
            text = json.dumps(answer, indent=1) + "\n"
            config.json.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; a mistake in it ends in one sentence."""
    try:
        run(tyro.cli(PlanConfig, args=arguments, prog="python -m train.plan"))
    except InputError as error:
        raise SystemExit(f"error: {error}") from error
