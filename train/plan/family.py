"""Whole runs of all optimizers: what each stage sends, and how many steps it has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType

import onebit_jax
from train.core.exchange import (
    WARMUP_BITS,
    WarmupBits,
    make_exchange,
    make_warmup_exchange,
)
from train.core.mesh import AXIS
from train.core.optimizer import OPTIMIZERS, make_optimizer
from train.core.totals import EVERY
from train.plan.model import update_seconds
from train.plan.report import aligned
from train.plan.transfers import loss_transfer

if TYPE_CHECKING:
    from train.plan.cluster import GpuCluster
    from train.plan.model import GpuWork, Model

EXACT_STAGES = "warmup", "local", EVERY
"""Stages whose update counts as Adam's; others' count as 1-bit Adam's. `EVERY` is the
stage of optimizers without stages: Adam, and those whose workers vote."""


class PredictedRun(NamedTuple):
    """A run of an optimizer.

    Attributes:
      name: The optimizer's, as of `--optimizer`, with `--warmup-bits` or `--sync`.
      steps: Steps by stage.
      gpu_bytes: Bytes that a GPU sends.
      host_bytes: Bytes that a host sends to others.
      seconds: Its length.
      state_bytes: Bytes of the optimizer's state on a GPU.
    """

    name: str
    steps: dict[str, int]
    gpu_bytes: float
    host_bytes: float
    seconds: float
    state_bytes: int


def predicted_runs(
    model: Model, work: GpuWork, cluster: GpuCluster, *, steps: int, freeze: int
) -> list[PredictedRun]:
    """Predicts a run with each optimizer of `--optimizer`, Adam's first.

    A step's transfers are read from the optimizer itself, by `onebit_jax.stage_costs`,
    and its stages are counted by running it so many steps on one parameter. Where
    several hosts have several GPUs, a host is one worker.
    """
    sizes = cluster.axis_sizes
    automatic = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), automatic)
    # Weight decay goes by names.
    leaves = {str(i): leaf for i, leaf in enumerate(model.leaves)}
    shards = cluster.gpus if cluster.hosts > 1 else 1
    workers = cluster.hosts * cluster.gpus // shards
    compressing = update_seconds(model, work, workers, shards)
    runs = []
    for chosen in CHOICES:
        tx = _optimizer(chosen, mesh, freeze)
        costs = onebit_jax.stage_costs(tx, leaves, sizes)
        taken = stage_steps(chosen, steps, freeze)
        gpu_bytes = host_bytes = seconds = 0.0
        for stage, transfers in costs.items():
            loads = cluster.loads((*transfers, loss_transfer(sizes)))
            number = taken[stage]
            gpu_bytes += number * sum(load.gpu_bytes for load in loads)
            host_bytes += number * sum(load.host_bytes for load in loads)
            exchange = sum(map(cluster.seconds, loads))
            exact = stage == "warmup" and chosen.warmup_bits == 32
            if exact or chosen.optimizer == "adam":
                exchange = max(0.0, exchange - work.hidden)
            compute = work.accumulate * work.micro_batch
            update = work.adam if stage in EXACT_STAGES else compressing
            seconds += number * (compute + update + exchange)
        held = state_bytes(tx, leaves, mesh)
        run = PredictedRun(chosen.name, taken, gpu_bytes, host_bytes, seconds, held)
        runs.append(run)
    return runs


class Choice(NamedTuple):
    """An optimizer of the command line, and flags of its own."""

    optimizer: str
    warmup_bits: WarmupBits = WARMUP_BITS
    sync: int | None = None

    @property
    def name(self) -> str:
        """The flags' text."""
        is_default = self.warmup_bits == WARMUP_BITS
        bits = "" if is_default else f" --warmup-bits {self.warmup_bits}"
        sync = f" --sync {self.sync}" if self.sync else ""
        return self.optimizer + bits + sync


CHOICES = [
    Choice(name, bits, sync)
    for name in sorted(OPTIMIZERS, key=lambda name: name != "adam")
    for bits in (WARMUP_BITS, 32)
    if bits == WARMUP_BITS or "warmup_bits" in OPTIMIZERS[name].flags
    for sync in ((8, 32) if "sync" in OPTIMIZERS[name].flags else (None,))
]
"""All that a run is predicted with, Adam first."""


def stage_steps(choice: Choice, steps: int, freeze: int) -> dict[str, int]:
    """The steps that a run has of each stage; `EVERY` for an optimizer without stages.

    Args:
      choice: The optimizer.
      steps: All of them.
      freeze: Those before the variance is frozen, where it is.

    Example:
      >>> from train.plan.family import Choice, stage_steps
      >>> stage_steps(Choice('onebit_lamb'), 100, 20)
      {'warmup': 20, 'compressed': 80}
    """
    workers = 2  # one would be plain Adam
    mesh = AbstractMesh((workers,), (AXIS,), (AxisType.Auto,))
    # Bits in the warm-up change no step's stage.
    tx = _optimizer(choice._replace(warmup_bits=32), mesh, freeze)
    run = onebit_jax.simulated(lambda p, x: jnp.mean(p[""] * x), tx, workers, axis=AXIS)
    batch = jnp.ones(workers)

    def step(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return run.step(*carry, batch)[:2]

    first = run.init({"": jnp.zeros([])})
    if not onebit_jax.steps_by_stage(first[1]):
        return {EVERY: steps}
    last = jax.jit(lambda carry: jax.lax.fori_loop(0, steps, step, carry))(first)
    taken = onebit_jax.steps_by_stage(last[1])
    return {stage: int(n) for stage, n in taken.items()}


def _optimizer(
    chosen: Choice, mesh: AbstractMesh, freeze: int
) -> optax.GradientTransformationExtraArgs:
    topology = "flat" if 1 in mesh.shape.values() else "auto"
    exchange = OPTIMIZERS[chosen.optimizer].exchange or "sign_mean"
    return make_optimizer(
        chosen.optimizer,
        optax.schedules.constant_schedule(1e-3),
        onebit_jax.freeze_at(freeze),
        make_exchange(mesh, exchange, topology),
        weight_decay=0.0,
        clip=0.0,
        warmup_exchange=make_warmup_exchange(mesh, chosen.warmup_bits, topology),
        sync=onebit_jax.every(chosen.sync) if chosen.sync else None,
    )


def state_bytes(tx: Any, params: Any, mesh: AbstractMesh) -> int:
    """Bytes of an optimizer's or an exchange's state on a device of the workers' mesh.

    Of state that differs between the workers a device's own share.
    """
    state = jax.tree.leaves(onebit_jax.abstract_state(tx, params, mesh))
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in state
    )


def family_table(runs: list[PredictedRun], parameters: int) -> str:
    """A row an optimizer, beside Adam's bytes and hours, and what its steps are.

    Says what the workers of local steps step by.
    """
    adam = runs[0]
    rows = [
        ("whole run", "sent, GB", "", "fewer", "hours", "faster", "state, bytes"),
        ("beside Adam fp32", "GPU", "host", "bytes", "", "", "a parameter"),
    ]
    for run in runs:
        sent, adams = (r.host_bytes or r.gpu_bytes for r in (run, adam))
        rows.append(
            (
                run.name,
                _two_digits(run.gpu_bytes / 1e9, 1),
                _two_digits(run.host_bytes / 1e9, 1),
                f"{adams / sent:.1f}" if sent else "",
                _two_digits(run.seconds / 3600, 2),
                f"{adam.seconds / run.seconds:.2f}",
                f"{run.state_bytes / parameters:.1f}",
            )
        )
    steps = [
        f"{run.name}: {', '.join(f'{n:,} {s}' for s, n in run.steps.items() if n)}"
        for run in runs
        if len(run.steps) > 1
    ]
    return "\n".join([aligned(rows), "", "Steps of each stage:", *steps, "", _INNER])


_INNER = (
    "local counts AdamW inside, the default of --inner. What docs/frontier.md says "
    "of losses is of --inner muon, whose own arithmetic is not counted. Each local "
    "step waits for the mean of the loss; stage='local' in a script does not."
)


def _two_digits(number: float, decimals: int) -> str:
    """A number with so many decimals, or more where they are not two digits."""
    if number >= 10 ** (1 - decimals):
        return f"{number:,.{decimals}f}"
    return f"{number:.2g}"
