"""The pages of what was measured on a GPU, from whole runs and from what is left."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.convergence.plan import read_plan
from benchmarks.convergence.runs import Run, Store
from benchmarks.convergence.study import wanted
from benchmarks.on_gpu import command, learning, pages
from benchmarks.on_gpu.command import main
from benchmarks.on_gpu.record import Record

DOCS = Path(__file__).parents[2] / "docs"


def rows(**milliseconds):
    return [
        {
            "operation": operation,
            "size": 100,
            "implementation": name,
            "milliseconds": taken,
        }
        for operation in ("compress", "compress with momentum")
        for name, taken in milliseconds.items()
    ]


@pytest.mark.parametrize(
    ("right", "times", "earned"),
    [
        (True, {"xla": 2.0, "mosaic": 1.0}, "['compress']"),
        (True, {"xla": 1.0, "mosaic": 2.0}, "[]"),
        (None, {"xla": 2.0, "mosaic": 1.0}, "[]"),
        (True, {"xla": 2.0}, "[]"),
    ],
)
def test_the_default_is_earned_by_right_and_fast(right, times, earned):
    found = {
        "facts": {"device_kind": "NVIDIA H100"},
        "fast": {"right": {"compress": right}, "results": {"rows": rows(**times)}},
    }
    assert pages.default_line(found).endswith(f"'NVIDIA H100': frozenset({earned})")


def test_the_pages_of_a_run_of_which_little_is_left(tmp_path, monkeypatch):
    """Parts that failed, were cut, and were left out; from any current folder."""
    memory = {"arguments": 2e9, "together": 3e9}
    adam = {"name": "Adam", "implementation": None, "workers": 1, "milliseconds": 2.0}
    adam |= {"memory_bytes": memory, "peak_bytes": None, "finite": False}
    broken = {"name": "1-bit Adam", "implementation": "mosaic", "workers": 1}
    ends = {
        "facts": {"end": "cut", "seconds": 3.0, "said": "was killed"},
        "fast": {"end": "failed", "seconds": 1.0, "said": "a | b (fast.log)"},
        "peer": {"end": "left out", "missing": ["torch"]},
    }
    found = {
        "facts": {"device_kind": "NVIDIA H100", "versions": {"jax": "1"}},
        "run": ends,
        "optimizer": {"values": 5e6, "rows": [adam, broken | {"error": "c | d"}]},
        "model": {"attention": {"error": "no cuDNN"}},
        "fast": {"right": {}},
    }
    for name, values in found.items():
        Record(tmp_path / f"{name}.json", 1).write(**values)
    docs = tmp_path / "docs"
    docs.mkdir()
    for page in ("kernels.md", "bert.md"):
        shutil.copyfile(DOCS / page, docs / page)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    main(["--pages", str(tmp_path)])
    kernels = (docs / "kernels.md").read_text()
    for line in (
        "| facts | cut | 3 | was killed |",
        r"| fast | failed | 1 | a \| b (fast.log) |",
        "| peer | left out |  | torch |",
        "The kernels' suite has not run.",
        "| Adam |  | 2, **not finite** | 1.00 | 2.00 | 3.00 |  |",
        r"| 1-bit Adam | mosaic | c \| d |  |  |  |  |",
    ):
        assert line in kernels
    assert "cuDNN's attention failed: no cuDNN." in (docs / "bert.md").read_text()
    other = tmp_path / "other"
    about = found["facts"] | {"device_kind": "NVIDIA H200"}
    other.mkdir()
    Record(other / "facts.json", 1).write(**about)
    main(["--pages", str(tmp_path), str(other)])
    for page in ("kernels.md", "bert.md"):
        text = (docs / page).read_text()
        assert text.count("**NVIDIA H100**") == text.count("**NVIDIA H200**") == 1
    assert len(json.loads((docs / "on-gpu.json").read_text())) == 2


def test_the_study_of_a_gpu_is_published_with_its_name(tmp_path):
    file = tmp_path / "on-gpu.toml"
    shutil.copyfile(DOCS / "studies" / file.name, file)
    plan, folder = read_plan(file), tmp_path / "run"
    folder.mkdir()
    store = Store(folder / learning.RUNS, plan)
    case = wanted(plan, {})[0]
    store.add(Run(case, dict(plan.arms[case.arm]), {600: {"loss": 1.5}}, 0, 1, 0, {}))
    driver = {"driver_version": "580.1", "power.limit": "700.00 W"}
    about = {"device_kind": "NVIDIA H100", "driver": driver, "versions": {"jax": "1"}}
    pages._write_study(folder, file, {"facts": about})
    page = file.with_suffix(".md").read_text()
    assert "| Adam | 0.0005 | 0.7 | 1.5000 | 1.5000 |" in page
    where = "**NVIDIA H100**; driver_version 580.1, power.limit 700.00 W, jax 1"
    assert page.endswith(f"Trained on {where}.\n")
