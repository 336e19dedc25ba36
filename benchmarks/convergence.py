"""Does 1-bit Adam learn as Adam does? Held-out loss of one small BERT, arm by arm.

Adam's learning rate is tuned first; every arm is then trained at that rate, on the
same samples, from the same parameters, for several seeds.

    python -m benchmarks.convergence --out docs/convergence

Runs that the JSON already holds are not repeated, so that an interrupted benchmark
goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import optax
import tyro
from tqdm import tqdm

import onebit_jax
from benchmarks.convergence_report import table, write_picture
from models import SIZES
from train.config import PretrainConfig
from train.data import Data, load
from train.examples import element
from train.mesh import AXIS
from train.objective import init_params, training_loss
from train.optimizer import decays, learning_rate_schedule
from train.program import compile_program, place

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

WEIGHT_DECAY = 0.01
CLIP = 1.0


@dataclasses.dataclass(frozen=True)
class Config:
    """What is compared."""

    out: Path = Path("docs/convergence")
    """Where the JSON and the picture go, without their suffixes."""
    corpus: tuple[Path, ...] = ()
    """Text; default: the reference documentation of the running Python."""
    model: str = "tiny"
    """Size of the BERT."""
    steps: int = 1000
    """Training steps."""
    freeze_step: int = 200
    """Steps of the warm-up."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises."""
    workers: int = 8
    """Virtual devices."""
    batch: int = 32
    """Sequences a step."""
    seq: int = 64
    """Tokens a sequence."""
    learning_rates: tuple[float, ...] = (
        2.5e-4,
        5e-4,
        1e-3,
        1.5e-3,
        2e-3,
        3e-3,
        4e-3,
    )
    """The grid that Adam's learning rate is tuned on, with the first seed."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each decides the parameters, the samples and their order."""


class Run(NamedTuple):
    """One training.

    Attributes:
      arm: name of the optimizer.
      learning_rate: the schedule's peak.
      seed: of parameters and samples.
      eval_losses: from step to held-out loss, in nats.
      sent_bytes: bytes that a worker sent in all.
      seconds: wall-clock time.
    """

    arm: str
    learning_rate: float
    seed: int
    eval_losses: dict[str, float]
    sent_bytes: int
    seconds: float


def without_error_feedback(exchange: onebit_jax.Exchange) -> onebit_jax.Exchange:
    """The exchange with errors that are forgotten instead of sent later."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        del params
        agreed, errors = exchange.update(updates, state, **extra)
        return agreed, jax.tree.map(lambda e: e * 0, errors)

    return onebit_jax.Exchange(exchange.init, update, exchange.axes)


def arms(freeze_step: int) -> dict[str, Callable[[optax.Schedule], Any]]:
    """The optimizers that are compared, from a learning rate schedule."""
    bits = onebit_jax.sign_mean(AXIS)
    freeze = onebit_jax.freeze_at(freeze_step)

    def adam(
        exchange: onebit_jax.Exchange,
    ) -> Callable[[optax.Schedule], optax.GradientTransformationExtraArgs]:
        return lambda schedule: optax.chain(
            exchange, optax.adamw(schedule, weight_decay=WEIGHT_DECAY, mask=decays)
        )

    def onebit(exchange: onebit_jax.Exchange, **options: Any) -> Callable[..., Any]:
        return lambda schedule: onebit_jax.onebit_adamw(
            schedule,
            exchange,
            freeze,
            weight_decay=WEIGHT_DECAY,
            mask=decays,
            **options,
        )

    return {
        "adam": adam(onebit_jax.exact_mean(AXIS)),
        "onebit_adam": onebit(bits),
        "onebit_adam, DeepSpeed's layout": onebit(
            onebit_jax.deepspeed_sign_mean(AXIS),
            bias_correction=False,
            as_published=True,
        ),
        "onebit_adam, no error feedback": onebit(without_error_feedback(bits)),
        "adam on compressed gradients": adam(bits),
        "frozen variance, exact exchange": onebit(onebit_jax.exact_mean(AXIS)),
    }


def train(
    config: Config, arm: str, learning_rate: float, seed: int, data: Data, mesh: Mesh
) -> Run:
    """Trains one arm with one seed."""
    model = dataclasses.replace(
        SIZES[config.model], vocab_size=len(data.vocabulary), dropout=0.0
    )
    schedule = learning_rate_schedule(learning_rate, config.warmup_steps, config.steps)
    tx = optax.chain(
        onebit_jax.clip_by_worker_norm(CLIP, AXIS),
        arms(config.freeze_step)[arm](schedule),
    )
    run = onebit_jax.data_parallel(training_loss(model, seed), tx, mesh)
    params, state = run.init(init_params(model, seed))
    program = compile_program(run, model, params, state, data, mesh)
    start, eval_losses = time.perf_counter(), {}
    for step in tqdm(range(config.steps), desc=f"{arm} {learning_rate:g} {seed}"):
        batch = place(element(data.training, step), mesh)
        params, state, loss = program.step(params, state, batch, np.uint32(step))
        loss.block_until_ready()
        if (step + 1) % (config.steps // 10) == 0:
            eval_losses[str(step + 1)] = program.evaluate(params)
    measured = onebit_jax.metrics(state)
    warmup = int(measured.get("frozen_at", config.steps))
    sent = (
        warmup * program.rates["warmup"]
        + (config.steps - warmup) * program.rates["compressed"]
    )
    seconds = time.perf_counter() - start
    return Run(arm, learning_rate, seed, eval_losses, sent, seconds)


def main(config: Config) -> None:
    """Trains what the JSON lacks, and writes JSON and picture."""
    jax.config.update("jax_num_cpu_devices", config.workers)
    mesh = jax.make_mesh(
        (config.workers,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
    )
    file = config.out.with_suffix(".json")
    settings = {
        name: value if isinstance(value, int | str) else str(value)
        for name, value in dataclasses.asdict(config).items()
        # More rates and seeds are more runs of the same benchmark.
        if name not in ("out", "learning_rates", "seeds")
    }
    runs: list[Run] = []
    if file.exists():
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["settings"] != settings:
            raise SystemExit(
                f"{file} is of other settings: remove it, or change --out."
            )
        runs = [Run(**run) for run in stored["runs"]]
    datas: dict[int, Data] = {}

    def trained(arm: str, learning_rate: float, seed: int) -> Run:
        for run in runs:
            if (run.arm, run.learning_rate, run.seed) == (arm, learning_rate, seed):
                return run
        if seed not in datas:
            with tempfile.TemporaryDirectory() as folder:
                flags = PretrainConfig(
                    corpus=config.corpus, batch=config.batch, seq=config.seq, seed=seed
                )
                datas[seed] = load(flags, Path(folder))
        run = train(config, arm, learning_rate, seed, datas[seed], mesh)
        runs.append(run)
        stored = {"settings": settings, "runs": [run._asdict() for run in runs]}
        file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        return run

    def final(run: Run) -> float:
        return run.eval_losses[str(config.steps)]

    tuning = [trained("adam", rate, config.seeds[0]) for rate in config.learning_rates]
    best = min(tuning, key=final).learning_rate
    compared = {
        arm: [trained(arm, best, seed) for seed in config.seeds]
        for arm in arms(config.freeze_step)
    }
    losses = {arm: [final(run) for run in compared[arm]] for arm in compared}
    ratio = statistics.mean(losses["onebit_adam"]) / statistics.mean(losses["adam"])
    print(f"onebit_adam's held-out loss is {ratio:.4f} of adam's, both at {best:g}")
    print(table(tuning, compared, config.steps))
    write_picture(
        config.out.with_suffix(".png"), compared, config.freeze_step, config.steps
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
