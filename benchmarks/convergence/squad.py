"""Are what 1-bit Adam and Adam have learnt worth the same? SQuAD from each, by F1.

    python -m benchmarks.convergence.squad --squad FILE --page docs/convergence.md

The weights that `python -m benchmarks.convergence` left of every arm, and random ones,
are fine-tuned by plain Adam on four of each five paragraphs, and those of 1-bit Adam by
1-bit Adam too. The fifth paragraphs are answered.

What the JSON already holds is not trained again, and a run that was interrupted goes on
from its newest checkpoint, exactly.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, cast

import tyro

from benchmarks.convergence.arms import ADAM, ARMS, ONEBIT_ADAM
from benchmarks.convergence.run import MODEL_FOLDER, Case, use_devices
from benchmarks.page import fill
from models.config import Size
from train.bert.data import VOCABULARY_FILE
from train.core import run_folder
from train.core.optimizer import OptimizerName
from train.squad.config import SquadConfig
from train.squad.fine_tune import fine_tune

RANDOM = "random weights"
_HELD_OUT = 5


@dataclasses.dataclass(frozen=True)
class Config:
    """What is fine-tuned."""

    squad: Path
    """A SQuAD file."""
    study: Path = Path("docs/convergence.json")
    """What the study wrote."""
    runs: Path = Path("runs/convergence")
    """Where it left its weights."""
    out: Path = Path("docs/convergence-squad.json")
    """Where the scores go."""
    page: Path | None = None
    """The Markdown page between whose marks, named as the JSON, the table goes."""
    steps: int = 150
    """Training steps."""
    batch: int = 32
    """Windows a step, of all workers together."""
    seq: int = 192
    """Tokens a window."""
    stride: int = 64
    """Word pieces between the starts of two windows over a text."""
    learning_rate: float = 5e-4
    """Peak of the learning rate."""
    workers: int = 8
    """Virtual devices."""


def split(squad: Path, learnt: Path, asked: Path) -> None:
    """Writes every fifth paragraph to one file and the others to another.

    Args:
      squad: A SQuAD file.
      learnt: Where the others go.
      asked: Where the fifth ones go.
    """
    content = json.loads(squad.read_text(encoding="utf-8"))
    parts: dict[Path, list[Any]] = {learnt: [], asked: []}
    paragraphs = (p for article in content["data"] for p in article["paragraphs"])
    for number, paragraph in enumerate(paragraphs):
        is_asked = number % _HELD_OUT == _HELD_OUT - 1
        parts[asked if is_asked else learnt].append(paragraph)
    for file, part in parts.items():
        text = json.dumps({**content, "data": [{"title": "", "paragraphs": part}]})
        file.write_text(text, encoding="utf-8")


def score(config: SquadConfig) -> dict[str, float]:
    """Fine-tunes, and scores the answers to what was held out and what was learnt.

    Args:
      config: The flags.

    Returns:
      F1 and exact match, in percent, by what was asked.
    """
    goes_on = run_folder.exists(config.out)
    asked = fine_tune(dataclasses.replace(config, resume=goes_on))["all"]
    again = dataclasses.replace(config, dev=None, resume=True)
    learnt = fine_tune(again)["all"]
    return {
        "F1": asked.f1,
        "exact match": asked.exact,
        "F1 of what was learnt": learnt.f1,
    }


def scored(config: Config) -> list[dict[str, Any]]:
    """Fine-tunes what the JSON lacks.

    Args:
      config: What is fine-tuned.

    Returns:
      Arm, optimizer, seed and scores of all.

    Raises:
      SystemExit: The JSON is of other settings.
    """
    stored = json.loads(config.study.read_text(encoding="utf-8"))
    cases = [Case(**run["case"]) for run in stored["runs"]]
    training = {
        name: getattr(config, name)
        for name in ("steps", "batch", "seq", "stride", "learning_rate", "workers")
    }
    settings = {
        **training,
        "study": config.study.stem,
        "squad": hashlib.sha256(config.squad.read_bytes()).hexdigest(),
    }
    weights, out = config.runs / config.study.stem, config.runs / config.out.stem
    done: list[dict[str, Any]] = []
    if config.out.exists():
        old = json.loads(config.out.read_text(encoding="utf-8"))
        if old["settings"] != settings:
            raise SystemExit(
                f"{config.out} is of other settings, weights or questions: remove it "
                f"and {out}, or change --out."
            )
        done = old["runs"]
    out.mkdir(parents=True, exist_ok=True)
    learnt, asked = out / "learnt.json", out / "asked.json"
    split(config.squad, learnt, asked)
    for case, arm, optimizer in _planned(cases):
        own = {"arm": arm, "optimizer": optimizer, "seed": case.seed}
        if any(own.items() <= run.items() for run in done):
            continue
        folder = weights / case.name / MODEL_FOLDER
        flags = SquadConfig(
            train=learnt,
            dev=asked,
            start=None if arm == RANDOM else folder,
            vocab=folder / VOCABULARY_FILE,
            model=cast("Size", stored["settings"]["model"]) if arm == RANDOM else None,
            optimizer=optimizer,
            seed=case.seed,
            dropout=0.0,
            checkpoint_every=50,
            out=out / f"{case.name if arm != RANDOM else 'random'}"
            f"-{case.seed}-{optimizer}",
            **training,
        )
        with ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=use_devices,
            initargs=(config.workers,),
        ) as process:
            done.append({**own, **process.submit(score, flags).result()})
        dump = json.dumps({"settings": settings, "runs": done}, indent=1) + "\n"
        config.out.write_text(dump, encoding="utf-8")
    return done


def _planned(cases: list[Case]) -> list[tuple[Case, str, OptimizerName]]:
    """A seed of all arms before the next: case, what it is told as, optimizer."""
    # The first of 1-bit Adam's is at Adam's best rate.
    plain = next(case for case in cases if case.arm == ONEBIT_ADAM)
    planned: list[tuple[Case, str, OptimizerName]] = []
    for seed in dict.fromkeys(case.seed for case in cases):
        for arm in ARMS:
            for case in cases:
                if case == plain._replace(arm=arm, seed=seed):
                    planned.append((case, arm, "adam"))
                    if arm == ADAM:
                        planned.append((case, RANDOM, "adam"))
                    if arm == ONEBIT_ADAM:
                        planned.append((case, arm, "onebit_adam"))
    return planned


def table(runs: list[dict[str, Any]]) -> str:
    """The scores as a Markdown table.

    Args:
      runs: Of `scored`.

    Returns:
      A line for each arm and optimizer, a cell with all its seeds.
    """
    heads = ("F1", "exact match", "F1 of what was learnt")
    lines = [
        f"| pre-trained by | fine-tuned by | {' | '.join(heads)} |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for arm, optimizer in dict.fromkeys((r["arm"], r["optimizer"]) for r in runs):
        own = [r for r in runs if (r["arm"], r["optimizer"]) == (arm, optimizer)]
        cells = [_cell([run[head] for run in own]) for head in heads]
        lines.append(f"| {arm} | {optimizer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    each = " ".join(f"{value:.1f}" for value in values)
    return f"{statistics.mean(values):.1f} ({each})" if len(values) > 1 else each


def main(config: Config) -> None:
    """Fine-tunes what the JSON lacks, prints the table and fills in the page."""
    text = table(scored(config))
    print(text)
    if config.page:
        page = config.page.read_text(encoding="utf-8")
        config.page.write_text(fill(page, config.out.stem, text), encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Config))
