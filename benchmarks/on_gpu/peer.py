"""BERT's training step beside Hugging Face's, in the same rounds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from benchmarks.bert.measure import measure as measure_bert
from benchmarks.on_gpu.device import device
from benchmarks.on_gpu.model import bert_config
from benchmarks.on_gpu.record import read

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.on_gpu.record import Record
    from benchmarks.on_gpu.sizes import Sizes


def measure(sizes: Sizes, record: Record) -> None:
    """Measures the part."""
    device(sizes, record.file.parent)
    attention = fastest(record.file.parent)
    record.write(attention=attention)
    steps: list[Any] = []
    for length in sizes.lengths:
        config = bert_config(
            sizes,
            (length,),
            attentions=(attention,),
            peers=sizes.peers,
            repeats=sizes.repeats,
        )
        (results,) = measure_bert(config)
        steps.append(dataclasses.asdict(results))
        record.write(steps=steps)
        record.check()


def fastest(folder: Path) -> str:
    """The attention of the most tokens a second that `model` has measured.

    All its lengths are added up; XLA's where it has measured none. One alone, as
    PyTorch needs memory beside it.
    """
    found = read(folder, "model")
    rows = [row for step in found.get("steps", []) for row in step["rows"]]
    if found.get("attention", {}).get("right") is False:
        rows = [row for row in rows if row["attention"] != "cudnn"]
    totals: dict[str, float] = {}
    for row in rows:
        name, rate = row["attention"], row["examples_per_second"] * row["length"]
        totals[name] = totals.get(name, 0.0) + rate
    return max(totals, key=lambda name: totals[name]) if totals else "xla"
