"""The process of `benchmarks.network` on each host: training steps and exchanges.

It reads requests from its standard input and writes a reply to each, in lines of JSON:

- `prepare` compiles a workload: a training step of an optimizer in one stage, or an
  exchange by itself. The reply has the bytes that leave a host, and
  the messages between hosts that wait for one another.
- `measure` runs it, or only its collectives, once unmeasured and then as often
  as it is told. The reply has the seconds of each time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import onebit_jax
from benchmarks.convergence.arms import make_arm
from benchmarks.network.traffic import (
    between_hosts,
    collectives_alone,
    host_bytes,
    host_loads,
)
from benchmarks.random_batch import random_batch
from models import SIZES
from train.bert.objective import init_params, training_loss
from train.core.exchange import make_exchange
from train.core.mesh import make_mesh
from train.core.optimizer import make_optimizer
from train.plan.transfers import MEASURING, PERIOD

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

    from train.core.exchange import ExchangeName

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of all workloads: the address of host 0, and flags of the command."""

    coordinator: str
    hosts: int
    devices: int
    model: str
    batch: int
    seq: int
    size: int


class Prepared(NamedTuple):
    """A workload, its collectives between hosts alone, and what it sends."""

    call: Callable[[], Any]
    alone: Callable[[], Any]
    sent_bytes: int
    rounds: float


def prepare_step(
    settings: Settings,
    mesh: Mesh,
    optimizer: Any,
    exchange: ExchangeName,
    stage: str | None,
) -> Prepared:
    """A training step of one optimizer in one stage, in place."""
    tx = make_optimizer(
        optimizer,
        optax.constant_schedule(LEARNING_RATE),
        onebit_jax.freeze_at(1),
        make_exchange(mesh, exchange),
        weight_decay=WEIGHT_DECAY,
        clip=CLIP,
    )
    return _prepare_step(settings, mesh, tx, stage)


def prepare_arm(
    settings: Settings, mesh: Mesh, options: dict[str, Any], stage: str | None
) -> Prepared:
    """A training step of a study's arm in one stage, in place."""
    tx = make_arm(
        options,
        optax.constant_schedule(LEARNING_RATE),
        onebit_jax.freeze_at(1),
        options.get("b1", 0.9),
        weight_decay=WEIGHT_DECAY,
        clip=CLIP,
        axes=mesh.axis_names,
    )
    return _prepare_step(settings, mesh, tx, stage)


def _prepare_step(
    settings: Settings,
    mesh: Mesh,
    tx: optax.GradientTransformationExtraArgs,
    stage: str | None,
) -> Prepared:
    model = dataclasses.replace(SIZES[settings.model], dropout=0.0)
    run = onebit_jax.data_parallel(training_loss(model, 0, mesh.axis_names), tx, mesh)
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    rows = settings.batch * settings.devices
    batch = jax.tree.map(
        functools.partial(jax.make_array_from_process_local_data, split),
        random_batch(model, rows, settings.seq, jax.process_index()),
    )
    arguments = batch, np.uint32(0)
    carried = run.init(init_params(model, 0))

    def compiled(stage: str | None) -> jax.stages.Compiled:
        static = {} if stage is None else {"stage": stage}
        return run.step.lower(*carried, *arguments, **static).compile()

    step, before = compiled(stage), []
    if stage == "compressed":
        # Its variance is that of a step before: of none it would be no number.
        warmup, *_ = onebit_jax.stage_costs(tx, carried[0], mesh.shape)
        before.append(compiled(warmup))

    def call() -> Any:
        nonlocal carried
        while before:  # once all hosts have compiled
            *carried, _ = before.pop()(*carried, *arguments)
        *carried, loss = step(*carried, *arguments)
        if not np.isfinite(loss.addressable_data(0)).all():
            raise FloatingPointError("a step that is not finite exchanges nothing")
        return loss

    return _prepare(settings, mesh, step, call)


def prepare_exchange(
    settings: Settings, mesh: Mesh, name: Literal["pmean"] | ExchangeName
) -> Prepared:
    """One exchange of a flat buffer by itself, in place."""
    axes = mesh.axis_names
    if name == "pmean":
        exchange = onebit_jax.exact_mean(axes)
    else:
        exchange = make_exchange(mesh, name)
    split = PartitionSpec(axes)
    random = np.random.default_rng(jax.process_index())
    local = random.standard_normal((settings.devices, settings.size), np.float32)
    values = jax.make_array_from_process_local_data(NamedSharding(mesh, split), local)
    state = onebit_jax.init(exchange, jnp.zeros(settings.size, jnp.float32), mesh)
    specs = onebit_jax.state_specs(state)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(split, specs), out_specs=(split, specs)
    )
    def update(values: Any, state: Any) -> Any:
        agreed, state = exchange.update(values[0], state)
        # As varying as what was given, in whose buffer it goes.
        return lax.pcast(agreed, axes, to="varying")[None], state

    carried = values, state
    compiled = update.lower(*carried).compile()

    def call() -> Any:
        nonlocal carried
        carried = compiled(*carried)
        return carried[0]

    return _prepare(settings, mesh, compiled, call)


def _prepare(
    settings: Settings,
    mesh: Mesh,
    compiled: jax.stages.Compiled,
    call: Callable[[], Any],
) -> Prepared:
    every, sometimes = [], []
    for each in onebit_jax.traffic(compiled, mesh).collectives:
        (sometimes if each.stage == MEASURING else every).append(each)
    between = between_hosts(every, settings.hosts)
    program, buffers = collectives_alone(between, mesh)

    def alone() -> Any:
        nonlocal buffers
        buffers, done = program(buffers)
        return buffers, done

    sent_bytes, more = (
        host_bytes(each, settings.hosts, settings.devices)
        for each in (every, sometimes)
    )
    loads = host_loads(every, settings.hosts, settings.devices)
    rounds = sum(load.rounds for load in loads)
    return Prepared(call, alone, sent_bytes + more // PERIOD, rounds)


def measure(call: Callable[[], Any], repeats: int) -> list[float]:
    """The seconds of each call after the first."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


PREPARE = {"step": prepare_step, "arm": prepare_arm, "exchange": prepare_exchange}
"""What prepares a workload, by the name that a request gives it."""


def main(settings: Settings, index: int) -> None:
    """Serves requests until the input ends."""
    # Gloo prints to the standard output.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    jax.config.update("jax_num_cpu_devices", settings.devices)
    jax.distributed.initialize(settings.coordinator, settings.hosts, index)
    mesh = make_mesh()
    workload = None
    for line in sys.stdin:
        request = json.loads(line)
        if "prepare" in request:
            workload = None  # Its memory is needed.
            prepare = PREPARE[request["prepare"]]
            workload = prepare(settings, mesh, **request["arguments"])
            reply = {"sent_bytes": workload.sent_bytes, "rounds": workload.rounds}
        else:
            assert workload, "nothing is prepared"
            call = operator.attrgetter(request["measure"])(workload)
            reply = {"seconds": measure(call, request["repeats"])}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])), int(sys.argv[2]))
