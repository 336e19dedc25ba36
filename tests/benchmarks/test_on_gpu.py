"""The command for a GPU runs whole on a CPU, cuts what overruns, and says the rest."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launching import is_running

from benchmarks.on_gpu import command, facts, model, pages, right, run
from benchmarks.on_gpu.command import main
from benchmarks.on_gpu.part import Record, read
from benchmarks.on_gpu.run import PARTS, Part
from benchmarks.on_gpu.sizes import TINY
from benchmarks.one_of_many import one_of_many
from onebit_jax import data_parallel, freeze_at, onebit_adam
from onebit_jax.exchanges.block_exchange import ErrorFeedbackState
from train.core.mesh import AXIS, make_mesh

ROOT = Path(__file__).parents[2]


@pytest.fixture
def docs(tmp_path):
    """The two pages that it writes into."""
    folder = tmp_path / "docs"
    (folder / "studies").mkdir(parents=True)
    for page in ("kernels.md", "bert.md"):
        shutil.copyfile(ROOT / "docs" / page, folder / page)
    return folder


@pytest.mark.slow
def test_the_whole_command_on_a_cpu(tmp_path, docs, capsys):
    """And into the pages, which name the device."""
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(out), "--minutes", "10", "--tiny"])
    assert not ended.value.code, capsys.readouterr().out
    ends = read(out, "run")
    assert [*ends] == [part.name for part in PARTS]
    for part in PARTS:
        end = "left out" if part.missing else "done"
        assert ends[part.name]["end"] == end, (out / f"{part.name}.log").read_text()
    check_found(out)
    pages.write_pages([out], docs)
    assert "'cpu': frozenset([])" in capsys.readouterr().out
    kernels = (docs / "kernels.md").read_text()
    assert "**cpu**" in kernels
    assert "against float64, by `mosaic_interpreted`: passed" in kernels
    assert "| compress with momentum | 4,096 | mosaic_interpreted |" in kernels
    assert "| 1-bit Adam, as published | mosaic_interpreted |" in kernels
    assert "| 16 | 2 | xla | float32 | tiny |" in (docs / "bert.md").read_text()


def check_found(out):
    about = read(out, "facts")
    assert about["device_kind"] == "cpu"
    assert about["product"]["tflops_per_second"] > 0
    assert read(out, "right") == {TINY.mosaic: True, "xla": True}
    rows = read(out, "fast")["results"]["rows"]
    assert {row["implementation"] for row in rows} >= {"xla", TINY.mosaic}
    steps = read(out, "optimizer")["rows"]
    assert [row["implementation"] for row in steps] == [None, "xla", TINY.mosaic]
    assert all(row["finite"] for row in steps), steps
    xla, cudnn = read(out, "model")["rows"]
    assert xla["tflops_per_second"] > 0
    assert cudnn["error"].startswith("cuDNN's attention computes in bfloat16")


def test_it_starts_without_what_the_machine_lacks():
    """Neither a command line's reader nor data pipelines nor checkpoints."""
    code = f"""
import importlib, sys
for name in ("tyro", "grain", "orbax", "tensorstore", "matplotlib", "tqdm"):
    sys.modules[name] = None
for name in {["command", *(part.name for part in PARTS)]}:
    importlib.import_module("benchmarks.on_gpu." + name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_what_overruns_is_cut_and_the_others_go_on(tmp_path, monkeypatch):
    """By a signal, its children too."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "run.json").write_text('{"earlier": {"end": "done"}}')
    leaving = "import subprocess as s; x = s.Popen(['sleep', '60'])\n"
    leaving += "open('{}', 'w').write(str(x.pid))"
    codes = {
        "hangs": "import subprocess, sys; subprocess.run(['sleep', '60'])",
        "fails": "raise SystemExit('no such thing')",
        "works": leaving.format(tmp_path / "left"),
    }

    def command(part, *_):
        return [sys.executable, "-S", "-c", codes[part.name]]

    monkeypatch.setattr(run, "command", command)
    begun = time.monotonic()
    parts = [Part("hangs", 1), Part("gone", 9, ("no_such_package",))]
    parts += [Part(name, 20) for name in ("fails", "works")]
    ends = run.run(parts, folder, 1.5, tiny=True)
    assert time.monotonic() - begun < 60
    assert [end["end"] for end in ends.values()] == [
        "cut",
        "left out",
        "failed",
        "done",
    ]
    assert ends["fails"]["said"] == "no such thing (fails.log, status 1)"
    assert "was killed at the end of its share" in ends["hangs"]["said"]
    assert ends["gone"]["missing"] == ["no_such_package"]
    assert "in wait" in (folder / "hangs.log").read_text()
    assert read(folder, "run") == {"earlier": {"end": "done"}} | ends
    assert ends_soon((tmp_path / "left").read_text())


def ends_soon(process):
    until = time.monotonic() + 30
    while is_running(process) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_running(process)


def test_a_suite_that_was_not_run_has_failed(tmp_path, monkeypatch):
    """Also where its files cannot be read, which pytest calls an interruption."""
    status, record = pytest.ExitCode.TESTS_FAILED, Record(tmp_path / "right.json")
    monkeypatch.setattr(pytest, "main", lambda *_, **__: status)
    assert not right.run_suite("xla", TINY, record)
    status = pytest.ExitCode.INTERRUPTED
    with pytest.raises(SystemExit, match="The tests of xla were not run"):
        right.run_suite("xla", TINY, record)


def test_the_driver_tells_the_first_gpu_with_units(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    said = "print('580.1, 81559 MiB, 700.00 W, 1980 MHz\\n' * 2)"
    command.write_text(f"#!{sys.executable} -S\n{said}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    values = "580.1", "81559 MiB", "700.00 W", "1980 MHz"
    assert facts.driver() == dict(zip(facts.DRIVER, values, strict=True))


def test_a_folder_is_of_one_kind_of_device(tmp_path):
    record = Record(tmp_path / "model.json")
    assert record.device(TINY) == jax.devices()[0]
    Record(tmp_path / "facts.json").write(device_kind="NVIDIA H100")
    match = r"on NVIDIA H100, and this is cpu: give --out"
    with pytest.raises(SystemExit, match=match):
        record.device(TINY)


def test_attention_has_no_error_where_it_is_the_same(monkeypatch):
    xla = model.results_of
    monkeypatch.setattr(model, "results_of", lambda name: xla("xla"))
    monkeypatch.setattr(model, "HEADS", 2)
    with jax.numpy_dtype_promotion("standard"):  # as without pytest
        found = model.attention_errors(16)
    assert len(found) == 4
    for row in found:
        assert row["right"]
        assert 1e-4 < row["xla"] == row["cudnn"] < 2e-2


def test_one_device_does_a_workers_work_of_encoding():
    """Alone, a worker of the product's exchange encodes nothing: its step is Adam's."""
    tx = onebit_adam(1e-3, one_of_many(AXIS), freeze_at(1))
    step = data_parallel(lambda p, x: jnp.sum(p["kernel"] * x[0]), tx, make_mesh(1))
    batch = jax.random.normal(jax.random.key(0), (1, 64, 64))
    params, state = step.init({"kernel": jnp.ones((64, 64))})
    for _ in range(3):
        params, state, _ = step.step(params, state, batch)
    parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ErrorFeedbackState))
    (errors,) = (x for x in parts if isinstance(x, ErrorFeedbackState))
    error = errors.small_error.value
    assert np.count_nonzero(error) > 0.9 * error.size


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
        "fast": {"right": right, "results": {"rows": rows(**times)}},
    }
    assert pages.default_line(found).endswith(f"'NVIDIA H100': frozenset({earned})")


def test_the_pages_of_a_run_of_which_little_is_left(tmp_path, docs, monkeypatch):
    """Parts that failed, were cut, and were left out; from any current folder."""
    adam = {"name": "Adam", "implementation": None, "milliseconds": 2.0}
    adam |= {"peak_gb": None, "finite": False}
    broken = {"name": "1-bit Adam", "implementation": "mosaic"}
    ends = {
        "facts": {"end": "cut", "seconds": 3.0, "said": "was killed"},
        "fast": {"end": "failed", "seconds": 1.0, "said": "a | b (fast.log)"},
        "model": {"end": "left out", "missing": ["flax"]},
    }
    found = {
        "facts": {"device_kind": "NVIDIA H100", "versions": {"jax": "1"}},
        "run": ends,
        "optimizer": {"values": 5e6, "rows": [adam, broken | {"error": "c | d"}]},
        "model": {"attention": [{"error": "no cuDNN"}]},
        "right": {"mosaic": False},
    }
    for name, values in found.items():
        Record(tmp_path / f"{name}.json").write(**values)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    main(["--pages", str(tmp_path)])
    kernels = (docs / "kernels.md").read_text()
    for line in (
        "| facts | cut | 3 | was killed |  |",
        r"| fast | failed | 1 | a \| b (fast.log) |  |",
        "| model | left out |  |  | ['flax'] |",
        "by `mosaic`: **failed**, so that its times are of wrong ones.",
        "| Adam |  | 2 |  | False |  |",
        r"| 1-bit Adam | mosaic |  |  |  | c \| d |",
    ):
        assert line in kernels
    assert "| no cuDNN |" in (docs / "bert.md").read_text()
    other = tmp_path / "other"
    about = found["facts"] | {"device_kind": "NVIDIA H200"}
    other.mkdir()
    Record(other / "facts.json").write(**about)
    main(["--pages", str(tmp_path), str(other)])
    for page in ("kernels.md", "bert.md"):
        text = (docs / page).read_text()
        assert text.count("**NVIDIA H100**") == text.count("**NVIDIA H200**") == 1
    assert len(json.loads((docs / "studies" / "gpu-parts.json").read_text())) == 2
