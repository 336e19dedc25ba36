"""A picture of where the bytes of a run go, from shapes and rules alone.

    python -m benchmarks.run_bytes --file docs/run-bytes.svg

A step sends what `stage_costs` says of its stage, for one float32 matrix. The stage of
each step is that of a run on one parameter.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import onebit_jax
from benchmarks.costs import PARAMS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WORKERS = 4
STEPS = 1000
FREEZE = 200

WIDTH, HEIGHT = 480, 426
LEFT, RIGHT, TOP, BOTTOM = 30, 470, 44, 380
HIGHEST = 7.1e9
"""Bytes at the upper edge, where Adam leaves the picture."""
EVERY = 40
"""Steps between two points of a line: whole rounds, and whole intervals of growth."""


class Run(NamedTuple):
    """A run in the picture.

    Attributes:
      name: Words for it.
      tx: Its optimizer.
      colour: The colour of its line and its words.
    """

    name: str
    tx: optax.GradientTransformation
    colour: str


def runs() -> list[Run]:
    """Adam, and lines of code of docs/choosing.md, from what sends most."""
    adam = optax.chain(onebit_jax.exact_mean("data"), optax.adamw(1.0))
    signs = onebit_jax.sign_mean("data")
    means = onebit_jax.sign_mean("data", scale="mean_abs")
    four_bits = onebit_jax.quantized_mean("data", 4)
    freeze, muon = onebit_jax.freeze_at(FREEZE), optax.contrib.muon(1.0)
    exact = onebit_jax.onebit_adamw(1.0, signs, freeze)
    by_bits = onebit_jax.onebit_adamw(1.0, signs, freeze, warmup_exchange=four_bits)
    by_fours = onebit_jax.local_steps(muon, four_bits, onebit_jax.every(4))
    by_eights = onebit_jax.local_steps(muon, means, onebit_jax.every(8))
    return [
        Run("Adam", adam, "#222"),
        Run("1-bit Adam", exact, "#2a6099"),
        Run("the same, warm-up by 4 bits", by_bits, "#c0392b"),
        Run("4 bits every 4 local steps", by_fours, "#3c763d"),
        Run("1 bit every 8 local steps", by_eights, "#8e44ad"),
    ]


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


def drawing() -> str:
    """The picture, as SVG in the hand of docs/how-it-travels.svg."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="14" '
        'fill="#222">',
        "<title>Gigabytes that a worker has sent, by the step of a run</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        *_ground(),
    ]
    x, y = _x(0.36 * STEPS), _y(0.6 * HIGHEST)
    lines.append(
        f'<rect x="{x:g}" y="{y:g}" width="{RIGHT - x:g}" height="130" fill="#fff"/>'
    )
    adams = 0.0
    for name, tx, colour in runs():
        sent = bytes_by_step(tx)
        adams = adams or sent[-1]
        inside = [i for i in range(0, STEPS + 1, EVERY) if sent[i] <= HIGHEST]
        lines.append(_curve([(i, sent[i]) for i in inside], colour))
        y += 24
        fewer = adams / sent[-1]
        fraction = f", 1/{fewer:.{0 if fewer > 10 else 1}f}" if fewer > 1 else ""
        words = f"{name}: {sent[-1] / 1e9:.2f} GB{fraction}"
        lines.append(_text(x, y, words, colour, "start"))
    return "\n".join([*lines, "</svg>", ""])


def _ground() -> Iterator[str]:
    """The warm-up's steps, and the axes."""
    yield (
        f'<rect x="{LEFT}" y="{TOP}" width="{_x(FREEZE) - LEFT:g}" '
        f'height="{BOTTOM - TOP}" fill="#fff3cd"/>'
    )
    yield _text(LEFT, 20, "GB that a worker has sent", anchor="start")
    yield _text((LEFT + _x(FREEZE)) / 2, TOP - 6, "warm-up")
    for gigabytes in range(int(HIGHEST / 1e9) + 1):
        y = _y(1e9 * gigabytes)
        yield f'<path d="M{LEFT} {y:g}H{RIGHT}" stroke="#555" stroke-opacity="0.35"/>'
        yield _text(LEFT - 8, y + 5, str(gigabytes), anchor="end")
    for step in range(0, STEPS + 1, FREEZE):
        yield _text(min(_x(step), RIGHT - 14), BOTTOM + 20, f"{step:,}")
    yield _text((LEFT + RIGHT) / 2, BOTTOM + 40, "steps")


def _curve(points: Sequence[tuple[int, float]], colour: str) -> str:
    places = " ".join(f"{_x(step):.1f},{_y(sent):.1f}" for step, sent in points)
    line = f'fill="none" stroke="{colour}" stroke-width="2.5"'
    return f'<polyline points="{places}" {line}/>'


def _text(
    x: float, y: float, words: str, colour: str = "#222", anchor: str = "middle"
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{words}</text>'


def _x(step: float) -> float:
    return LEFT + step / STEPS * (RIGHT - LEFT)


def _y(sent: float) -> float:
    return BOTTOM - sent / HIGHEST * (BOTTOM - TOP)


def main(file: Path) -> None:
    """Writes the picture.

    Args:
      file: Where it goes.
    """
    file.write_text(drawing(), "utf-8")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmarks.run_bytes")
