"""Updates of 2 to 512 workers while the signal grows.

`python -m benchmarks.convergence.many_workers` writes the page and its JSON.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

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
OUT = Path(__file__).parents[2] / "docs" / "studies" / "many-workers"
AXIS, WORKERS, SIZE = "data", (2, 8, 64, 512), 4096
STEPS, FREEZE = 1200, 200
"""The last tenth of the steps is measured; from the freeze the signal grows for as many
steps as there are before it."""
SIGNAL, NOISE, GROWTH = 0.5, 10.0, 10.0
"""Root mean square of the signal at first, a worker's noise, how the signal grows."""
SIGNALS = {"even": "±1", "normal": "normally distributed"}
ARMS: Mapping[str, Callable[..., Any]] = {
    "Adam": lambda: optax.chain(onebit_jax.exact_mean(AXIS), optax.adam(1.0)),
    "1-bit Adam": partial(onebit_jax.onebit_adam, 1.0, onebit_jax.sign_mean(AXIS)),
    "its parts, exact exchange": partial(
        onebit_jax.onebit_adam, 1.0, onebit_jax.exact_mean(AXIS)
    ),
    "1-bit Adam without a lead": partial(
        onebit_jax.onebit_adam,
        1.0,
        onebit_jax.sign_mean(AXIS),
        compressed=onebit_jax.Compressed(lead=None),
    ),
    "as published": partial(
        onebit_jax.onebit_adam,
        1.0,
        onebit_jax.sign_mean(AXIS, scale="rms"),
        compressed=onebit_jax.Compressed.published(),
    ),
}


def late_rms(arm: str, workers: int, signal: Array) -> float:
    """The root mean square of an arm's last updates, of a learning rate of 1."""
    make = ARMS[arm]
    freezes = () if arm == "Adam" else (onebit_jax.freeze_at(FREEZE),)
    # The gradient of a product is its other factor.
    run = onebit_jax.simulated(
        lambda params, own: jnp.vdot(params, own[0]), make(*freezes), workers, axis=AXIS
    )

    def one(carry: Any, step: Array) -> tuple[Any, Array]:
        params, state = carry
        factor = 1 + (GROWTH - 1) * jnp.clip((step - FREEZE) / FREEZE, 0, 1)
        key = jax.random.fold_in(jax.random.key(0), step)
        noise = jax.random.normal(key, (workers, signal.size))
        batch = SIGNAL * factor * signal + NOISE * noise
        new, state, _ = run.step(params, state, batch)
        return (params, state), jnp.mean(jnp.square(new - params))

    squares = jax.jit(lambda carry: jax.lax.scan(one, carry, jnp.arange(STEPS))[1])
    return float(jnp.sqrt(jnp.mean(squares(run.init(signal))[-STEPS // 10 :])))


def measure() -> list[dict[str, Any]]:
    """Adam's root mean square and others' as multiples of it, by signal and workers."""
    rng = np.random.default_rng(0)
    signals = {
        "even": rng.choice([-1.0, 1.0], SIZE),
        "normal": rng.normal(size=SIZE),
    }
    rows = []
    for name, signal in signals.items():
        for workers in WORKERS:
            found = {arm: late_rms(arm, workers, jnp.float32(signal)) for arm in ARMS}
            adam = found.pop("Adam")
            others = {arm: rms / adam for arm, rms in found.items()}
            rows.append({"signal": name, "workers": workers, "Adam": adam, **others})
            print(rows[-1], flush=True)
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown page."""
    heads = ["signal", "workers", "Adam's", *list(ARMS)[1:]]
    cells = [
        [
            SIGNALS[row["signal"]],
            str(row["workers"]),
            *(f"{row[arm]:.2f}" for arm in ARMS),
        ]
        for row in rows
    ]
    return f"{ABOUT}\n\n{table(heads, cells)}\n"


if __name__ == "__main__":
    measured = measure()
    dump = json.dumps({"rows": measured}, indent=1)
    OUT.with_suffix(".json").write_text(dump + "\n", encoding="utf-8")
    OUT.with_suffix(".md").write_text(page(measured), encoding="utf-8")
