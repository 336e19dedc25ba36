"""The documentation's pages of what `benchmarks.on_gpu` has found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks.kernels.measure import read_json
from benchmarks.kernels.measure import text as kernels_text
from benchmarks.on_gpu.part import read
from benchmarks.on_gpu.run import PARTS
from benchmarks.page import fill, table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TIMED = {
    "compress": ("compress", "compress with momentum"),
    "average_and_recompress": ("average and recompress",),
}
"""The operations that are timed of each function of `pallas_kernels`."""

Found = dict[str, Any]


def write_pages(folders: Sequence[Path], docs: Path) -> None:
    """Writes `kernels.md`, `bert.md` and `studies/gpu-parts.json`, which holds all.

    Args:
      folders: Those of runs, one for each GPU.
      docs: The documentation.

    Raises:
      SystemExit: A folder holds no run, or a page lacks its marks.
    """
    runs = [_read_run(folder) for folder in folders]
    for name, mark, part in (
        ("kernels.md", "on_gpu", kernels_part),
        ("bert.md", "gpu", bert_part),
    ):
        page = (docs / name).read_text(encoding="utf-8")
        text = "\n\n".join(map(part, runs))
        (docs / name).write_text(fill(page, mark, text), encoding="utf-8")
    dump = json.dumps(runs, indent=1, ensure_ascii=False)
    (docs / "studies" / "gpu-parts.json").write_text(dump + "\n", encoding="utf-8")
    print(*map(default_line, runs), sep="\n")


def _read_run(folder: Path) -> Found:
    """The results of all parts, and how each has ended."""
    found = {part.name: read(folder, part.name) for part in PARTS}
    if not found["facts"]:
        raise SystemExit(
            f"{folder} has no facts.json: give the folder of a run whose facts were "
            "measured, or measure them there with --parts facts."
        )
    return found | {"run": read(folder, "run")}


def _device(found: Found) -> str:
    """The device and its software in a line."""
    facts = found["facts"]
    about = {**facts.get("driver", {}), **facts["versions"]}
    said = ", ".join(f"{name} {value}" for name, value in about.items())
    return f"**{facts['device_kind']}**; {said}"


def kernels_part(found: Found) -> str:
    """The part of `kernels.md`, as Markdown."""
    ends = [{"part": name, **end} for name, end in found["run"].items()]
    parts = [_device(found), rows_table(ends)]
    parts += [
        f"The kernels' suite against float64, by `{name}`: "
        f"{'passed' if passed else '**failed**, so that its times are of wrong ones'}."
        for name, passed in found["right"].items()
    ]
    if results := found["fast"].get("results"):
        parts.append(kernels_text(read_json(results)))
    if product := found["facts"].get("product"):
        parts.append(rows_table([product]))
    if rows := found["optimizer"].get("rows"):
        values = f"Steps of {found['optimizer']['values']:,} values:"
        parts += [values, rows_table(rows)]
    return "\n\n".join(parts)


def bert_part(found: Found) -> str:
    """The part of `bert.md`, as Markdown."""
    parts = [_device(found)]
    if attention := found["model"].get("attention"):
        parts.append(rows_table(attention))
    if steps := found["model"].get("rows"):
        parts.append(rows_table(steps))
    return "\n\n".join(parts)


def rows_table(rows: Sequence[Found]) -> str:
    """Rows as a table with a column for each name in them.

    Example:
      >>> from benchmarks.on_gpu.pages import rows_table
      >>> print(rows_table([{"peak_gb": 2.0}, {"error": "no memory"}]))
      | peak gb | error |
      |---|---|
      | 2 |  |
      |  | no memory |
    """
    names = dict.fromkeys(name for row in rows for name in row)
    heads = [name.replace("_", " ") for name in names]
    return table(heads, ([_cell(row.get(name)) for name in names] for row in rows))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def default_line(found: Found) -> str:
    """The line of `pallas_kernels._choose` that the measurements earn.

    It has the operations that are nowhere slower than XLA's form, of kernels that are
    right.
    """
    rows = found["fast"].get("results", {}).get("rows", [])
    earned = [
        name
        for name, timed in TIMED.items()
        if found["fast"].get("right") and _never_slower(rows, timed)
    ]
    kind = found["facts"]["device_kind"]
    return f"_MOSAIC of pallas_kernels/_choose.py: {kind!r}: frozenset({earned})"


def _never_slower(rows: list[Found], timed: tuple[str, ...]) -> bool:
    times: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["operation"] in timed:
            of_case = times.setdefault((row["operation"], row["size"]), {})
            of_case[row["implementation"]] = row["milliseconds"]
    return bool(times) and all(
        "mosaic" in x and "xla" in x and x["mosaic"] <= x["xla"] for x in times.values()
    )
