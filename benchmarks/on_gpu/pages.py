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
    """Writes `kernels.md`, `bert.md` and a JSON of all.

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
    (docs / "on-gpu.json").write_text(dump + "\n", encoding="utf-8")
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
    parts = [_device(found), _ends(found), _tests(found)]
    if results := found["fast"].get("results"):
        parts.append(kernels_text(read_json(results)))
        wrong = [name for name, x in found["fast"]["right"].items() if x is False]
        if wrong:
            parts.append(
                f"Times of {' and '.join(wrong)} are those of **wrong** kernels."
            )
    if product := found["facts"].get("product"):
        parts.append(
            f"Matrix product of {product['size']:,}², {product['dtype']}: "
            f"{product['tflops_per_second']:.0f} TFLOP/s."
        )
    if found["optimizer"].get("rows"):
        parts.append(_optimizer(found["optimizer"]))
    return "\n\n".join(parts)


def _ends(found: Found) -> str:
    """A table of the parts and of how each ended."""
    cells = [
        (
            name,
            end["end"],
            f"{end['seconds']:.0f}" if "seconds" in end else "",
            end.get("said") or ", ".join(end.get("missing", [])),
        )
        for name, end in found["run"].items()
    ]
    return table(("part", "ended", "seconds", "said"), cells)


def _tests(found: Found) -> str:
    """The outcomes of the kernels' suite."""
    lines = []
    for implementation, tests in found["right"].get("tests", {}).items():
        outcomes = tests["outcomes"]
        failed = [name for name, x in outcomes.items() if x["outcome"] == "failed"]
        said = f"{len(failed)} of {len(outcomes)} tests against float64 failed"
        said += "" if tests["complete"] else ", not all of them were run"
        lines.append(f"- `{implementation}`: {said}")
        lines += [f"  - `{name}`" for name in failed]
    return "\n".join(lines) or "The kernels' suite has not run."


def _optimizer(found: Found) -> str:
    """The optimizer's steps on the parameters of BERT."""
    first = found["rows"][0].get("milliseconds")

    def cells(row: Found) -> tuple[str, ...]:
        name = row["name"], row["implementation"] or ""
        if "error" in row:
            return *name, row["error"], *[""] * 4
        memory, peak = row["memory_bytes"], row["peak_bytes"]
        return (
            *name,
            f"{row['milliseconds']:.3g}{'' if row['finite'] else ', **not finite**'}",
            f"{row['milliseconds'] / first:.2f}" if first else "",
            f"{memory['arguments'] / 1e9:.2f}",
            f"{memory['together'] / 1e9:.2f}",
            f"{peak / 1e9:.2f}" if peak else "",
        )

    heads = (
        f"step of {found['values'] / 1e6:.0f} M values",
        "compressed by",
        "ms",
        "of Adam's",
        "GB of arguments",
        "GB as compiled",
        "GB at the peak",
    )
    return table(heads, map(cells, found["rows"]))


def bert_part(found: Found) -> str:
    """The part of `bert.md`, as Markdown."""
    parts = [_device(found)]
    attention = found["model"].get("attention", {})
    if "errors" in attention:
        rows = [
            (of, *(f"{errors[i]:.2e}" for errors in attention["errors"].values()))
            for i, of in enumerate(attention["of"])
        ]
        heads = "relative error in bfloat16 of", *attention["errors"]
        verdict = "right" if attention["right"] else "**wrong**"
        parts += [table(heads, rows), f"cuDNN's attention is {verdict}."]
    elif attention:
        parts.append(f"cuDNN's attention failed: {attention['error']}.")
    if steps := found["model"].get("rows"):
        heads = (
            "step",
            "sequences",
            "attention",
            "ms",
            "examples/s",
            "TFLOP/s",
            "of the matrix product",
            "GB as compiled",
        )
        parts.append(table(heads, map(_step_cells, steps)))
    return "\n\n".join(parts)


def _step_cells(row: Found) -> tuple[str, ...]:
    what = f"{row['model']}, {row['dtype']}", f"{row['batch']} x {row['length']}"
    if "error" in row:
        return *what, row["attention"], row["error"], *[""] * 4
    return (
        *what,
        row["attention"],
        f"{row['milliseconds']:.4g}",
        f"{row['examples_per_second']:.4g}",
        f"{row['tflops_per_second']:.3g}",
        f"{row['of_peak']:.0%}" if row["of_peak"] else "",
        f"{row['memory_bytes'] / 1e9:.2f}",
    )


def default_line(found: Found) -> str:
    """The line of `pallas_kernels._choose` that the measurements earn.

    It has the operations that are right and nowhere slower than XLA's form.
    """
    right = found["fast"].get("right", {})
    rows = found["fast"].get("results", {}).get("rows", [])
    earned = [
        name
        for name, timed in TIMED.items()
        if right.get(name) and _never_slower(rows, timed)
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
