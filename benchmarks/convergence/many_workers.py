"""Updates of 2 to 512 workers while the signal grows.

`python -m benchmarks.convergence.many_workers --out docs/studies/many-workers` writes
the page and its JSON.
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import onebit_jax
from benchmarks.page import table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

ABOUT = """\
# Updates of 2 to 512 workers while the signal grows

Every worker has gradients of one signal and noise of its own, of the same size however
many workers there are. After the freeze the signal grows ten times under the same
noise. Adam's variance grows with it, and a frozen one must follow, or updates grow too.

*Signal* says how the signal's values are distributed over the parameters. *Adam's* is
the root mean square of Adam's last updates at a learning rate of 1; the columns after
it are that of other optimizers, in multiples of Adam's. This page is written by
`python -m benchmarks.convergence.many_workers`."""
AXIS = "data"
SIGNALS = {"even": "±1", "normal": "normally distributed"}
ARMS: Mapping[str, Callable[..., Any]] = {
    "Adam": lambda: optax.chain(onebit_jax.exact_mean(AXIS), optax.adam(1.0)),
    "1-bit Adam": partial(onebit_jax.onebit_adam, 1.0, onebit_jax.sign_mean(AXIS)),
    "its parts, exact exchange": partial(
        onebit_jax.onebit_adam, 1.0, onebit_jax.exact_mean(AXIS)
    ),
    "1-bit Adam without a lead": partial(
        onebit_jax.onebit_adam, 1.0, onebit_jax.sign_mean(AXIS), lead=None
    ),
    "as published": partial(
        onebit_jax.onebit_adam,
        1.0,
        onebit_jax.sign_mean(AXIS, scale="rms"),
        **onebit_jax.AS_PUBLISHED,
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Compares updates of compressed optimizers with Adam's, by number of workers."""

    out: Path | None = None
    """The JSON and the Markdown, without their suffixes."""
    workers: tuple[int, ...] = (2, 8, 64, 512)
    """Numbers of workers; one is plain Adam."""
    size: int = 4096
    """Parameters."""
    steps: int = 1200
    """Steps; the last tenth of them is measured."""
    freeze_step: int = 200
    """Steps of the warm-up; in as many more the signal grows."""
    signal: float = 0.5
    """Root mean square of the signal at first."""
    noise: float = 10.0
    """Standard deviation of a worker's noise."""
    growth: float = 10.0
    """How many times the signal grows."""


def late_rms(config: Config, arm: str, workers: int, signal: Array) -> float:
    """The root mean square of an arm's last updates, of a learning rate of 1.

    Args:
      config: The flags.
      arm: A name of `ARMS`.
      workers: How many there are.
      signal: (size,) of mean square 1.

    Returns:
      The root of the mean over the last tenth of the steps.
    """
    make = ARMS[arm]
    freezes = () if arm == "Adam" else (onebit_jax.freeze_at(config.freeze_step),)
    # The gradient of a product is its other factor.
    run = onebit_jax.simulated(
        lambda params, own: jnp.vdot(params, own[0]), make(*freezes), workers, axis=AXIS
    )

    def one(carry: Any, step: Array) -> tuple[Any, Array]:
        params, state = carry
        risen = (step - config.freeze_step) / config.freeze_step
        factor = 1 + (config.growth - 1) * jnp.clip(risen, 0, 1)
        shape = workers, config.size
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), shape)
        batch = config.signal * factor * signal + config.noise * noise
        new, state, _ = run.step(params, state, batch)
        return (params, state), jnp.mean(jnp.square(new - params))

    squares = jax.jit(
        lambda carry: jax.lax.scan(one, carry, jnp.arange(config.steps))[1]
    )
    return float(jnp.sqrt(jnp.mean(squares(run.init(signal))[-config.steps // 10 :])))


def measure(config: Config) -> list[dict[str, Any]]:
    """A row for each signal and number of workers.

    Args:
      config: The flags.

    Returns:
      Adam's root mean square, and that of each other arm as a multiple of it.
    """
    rng = np.random.default_rng(0)
    signals = {
        "even": rng.choice([-1.0, 1.0], config.size),
        "normal": rng.normal(size=config.size),
    }
    rows = []
    for name, signal in signals.items():
        for workers in config.workers:
            of = partial(late_rms, config, workers=workers, signal=jnp.float32(signal))
            adam, *others = (of(arm) for arm in ARMS)
            rows.append(
                {
                    "signal": name,
                    "workers": workers,
                    "Adam": adam,
                    **dict(
                        zip(list(ARMS)[1:], (x / adam for x in others), strict=True)
                    ),
                }
            )
            print(rows[-1], flush=True)
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown page."""
    arms = list(ARMS)[1:]
    lines = table(
        ["signal", "workers", "Adam's", *arms],
        [
            [
                SIGNALS[row["signal"]],
                str(row["workers"]),
                f"{row['Adam']:.2f}",
                *(f"{row[arm]:.2f}" for arm in arms),
            ]
            for row in rows
        ],
    )
    return f"{ABOUT}\n\n{lines}\n"


def main(config: Config) -> None:
    """Measures, prints the page and writes it."""
    rows = measure(config)
    print(page(rows))
    if config.out:
        settings = {**dataclasses.asdict(config), "out": None}
        stored = json.dumps({"settings": settings, "rows": rows}, indent=1)
        config.out.with_suffix(".json").write_text(stored + "\n", encoding="utf-8")
        config.out.with_suffix(".md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.convergence.many_workers"))
