"""A picture of where the bytes of a run go, from shapes and rules alone.

    python -m benchmarks.run_bytes --file docs/run-bytes.svg

A step sends what `stage_costs` says of its stage, for one float32 matrix. The stage of
each step is that of a run on one parameter.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tyro
from matplotlib.figure import Figure

import onebit_jax
from benchmarks.costs import PARAMS
from train.core.exchange import WARMUP_BITS
from train.core.optimizer import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKERS = 4
STEPS = 1000
HIGHEST = 7.1e9
"""Bytes at the upper edge, where Adam leaves the picture."""


def runs() -> dict[str, optax.GradientTransformation]:
    """Optimizers by name, from what sends most: Adam, and those of docs/choosing.md."""
    signs = onebit_jax.sign_mean("data")
    means = onebit_jax.sign_mean("data", scale="mean_abs")
    four_bits = onebit_jax.quantized_mean("data", 4)
    warmup = onebit_jax.quantized_mean("data", WARMUP_BITS)
    share, muon = OPTIMIZERS["onebit_adam"].freeze, optax.contrib.muon(1.0)
    freeze, earlier = (onebit_jax.freeze_at(round(s * STEPS)) for s in (0.2, share))
    return {
        "Adam": optax.chain(onebit_jax.exact_mean("data"), optax.adamw(1.0)),
        "1-bit Adam, exact warm-up": onebit_jax.onebit_adamw(1.0, signs, freeze),
        f"1-bit Adam, {WARMUP_BITS} bits in it": onebit_jax.onebit_adamw(
            1.0, signs, earlier, warmup_exchange=warmup
        ),
        "4 bits every 4 local steps": onebit_jax.local_steps(
            muon, four_bits, onebit_jax.every(4)
        ),
        "1 bit every 8 local steps": onebit_jax.local_steps(
            muon, means, onebit_jax.every(8)
        ),
    }


def bytes_by_step(tx: optax.GradientTransformation) -> np.ndarray:
    """Bytes that a worker has sent after so many steps of a run, from none to all.

    Example:
      >>> import onebit_jax, optax
      >>> from benchmarks.run_bytes import bytes_by_step
      >>> exact = onebit_jax.exact_mean('data')
      >>> sent = bytes_by_step(optax.chain(exact, optax.sgd(1.0)))
      >>> [float(n / 2**22) for n in sent[:3]]  # 6 of 4 workers, for 4,096 x 1,024
      [0.0, 6.0, 12.0]
    """
    run = onebit_jax.simulated(lambda p, x: jnp.mean(p * x), tx, WORKERS)

    def step(carry: Any, _: None) -> tuple[Any, dict[str, jax.Array]]:
        carry = run.step(*carry, jnp.ones(WORKERS))[:2]
        return carry, onebit_jax.steps_by_stage(carry[1])

    first = run.init(jnp.zeros([]))
    taken = jax.jit(lambda c: jax.lax.scan(step, c, length=STEPS)[1])(first)
    sizes = {"data": WORKERS}
    sent = np.zeros(STEPS)
    for stage, transfers in onebit_jax.stage_costs(tx, PARAMS, sizes).items():
        number = taken[stage] if taken else np.arange(1, STEPS + 1)
        sent += np.asarray(number, float) * onebit_jax.sent_bytes(transfers, sizes)
    return np.concatenate([[0.0], sent])


def lines() -> dict[str, np.ndarray]:
    """Bytes by step, by words that tell the run's own and its share of Adam's."""
    sent = {name: bytes_by_step(tx) for name, tx in runs().items()}
    (_, adam), *_ = sent.items()
    named = {}
    for name, by_step in sent.items():
        fewer = adam[-1] / by_step[-1]
        share = f", 1/{fewer:.{0 if fewer > 10 else 1}f}" if fewer > 1 else ""
        named[f"{name}: {by_step[-1] / 1e9:.2f} GB{share}"] = by_step
    return named


def drawn(sent: Mapping[str, np.ndarray]) -> Figure:
    """The lines, Adam's as far as it stays in the picture."""
    figure = Figure(figsize=(5, 4.4), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(0, STEPS + 1, 20)  # both freezes are among them
    for name, by_step in sent.items():
        axes.plot(steps, by_step[steps] / 1e9, label=name, linewidth=2)
    axes.set(
        title="GB that a worker has sent",
        xlabel="step",
        xlim=(0, STEPS),
        ylim=(0, HIGHEST / 1e9),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center right", bbox_to_anchor=(1, 0.45))
    return figure


def main(file: Path) -> None:
    """Writes the picture.

    Args:
      file: Where it goes.
    """
    # Words stay words, and the same picture the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bytes"}):
        title = "Gigabytes that a worker has sent, by the step of a run"
        drawn(lines()).savefig(file, metadata={"Date": None, "Title": title})


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmarks.run_bytes")
