"""The command for a GPU runs whole on a CPU, cuts what overruns, and says the rest."""

import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.convergence.plan import read_plan
from benchmarks.convergence.runs import Store
from benchmarks.convergence.study import wanted
from benchmarks.kernels.report import text as kernels_text
from benchmarks.on_gpu import facts, fast, learning, model, pages, right, run
from benchmarks.on_gpu.command import main
from benchmarks.on_gpu.device import device
from benchmarks.on_gpu.parts import PARTS, Part
from benchmarks.on_gpu.peer import fastest
from benchmarks.on_gpu.record import OutOfTimeError, Record, read
from benchmarks.on_gpu.right import verdicts
from benchmarks.on_gpu.sizes import SIZES, TINY

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
def test_the_whole_command_on_a_cpu(tmp_path, capsys):
    """And into the pages, which name the device."""
    out, docs = tmp_path / "out", tmp_path / "docs"
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(out), "--minutes", "10", "--tiny"])
    assert not ended.value.code, capsys.readouterr().out
    ends = read(out, "run")
    assert [*ends] == [part.name for part in PARTS]
    for part in PARTS:
        end = "left out" if part.missing else "done"
        assert ends[part.name]["end"] == end, (out / f"{part.name}.log").read_text()
    check_found(out)
    docs.mkdir()
    for page in ("kernels.md", "bert.md"):
        shutil.copyfile(DOCS / page, docs / page)
    (out / learning.RUNS).unlink()  # of another plan than the published study's
    pages.write_pages([out], docs)
    earned = "'cpu': frozenset([])"
    assert earned in capsys.readouterr().out
    kernels = (docs / "kernels.md").read_text()
    assert "**cpu**" in kernels
    assert "0 of 1 tests against float64 failed" in kernels
    assert (
        "| compress with momentum | donated | 4,096 | mosaic_interpreted |" in kernels
    )
    assert "| 1-bit Adam, as published, 2 workers on it | xla |" in kernels
    assert "**tiny, 2 x 16 tokens, float32.**" in (docs / "bert.md").read_text()


def check_found(out):
    about = read(out, "facts")
    assert about["device_kind"] == "cpu"
    assert about["copies"][0]["gb_per_s"] > 0
    tests = read(out, "right")["tests"]
    assert all(all(x["right"].values()) for x in tests.values())
    rows = read(out, "fast")["results"]["rows"]
    assert {row["implementation"] for row in rows} >= {"xla", TINY.mosaic}
    steps = read(out, "optimizer")["rows"]
    assert [(row["implementation"], row["workers"]) for row in steps] == [
        (None, 1),
        ("xla", 1),
        (TINY.mosaic, 1),
        ("xla", 2),
    ]
    assert all(row["finite"] for row in steps), steps
    (step,) = read(out, "model")["steps"]
    assert [row["attention"] for row in step["rows"]] == ["xla"]
    assert "cudnn" in step["skipped"][1]
    runs = Store(out / learning.RUNS, learning.plan_of(TINY)).runs.values()
    assert [r.case.arm for r in runs] == ["Adam", "1-bit Adam"]


def test_it_starts_without_what_the_machine_lacks():
    """Neither a command line's reader nor data pipelines nor checkpoints."""
    code = f"""
import importlib, sys
for name in ("tyro", "grain", "orbax", "tensorstore", "matplotlib", "tqdm"):
    sys.modules[name] = None
for name in {[part.name for part in PARTS]}:
    importlib.import_module("benchmarks.on_gpu." + name)
import benchmarks.on_gpu.command
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_what_overruns_is_cut_and_the_others_go_on(tmp_path, monkeypatch):
    """By itself where it looks at the time, else by a signal, its children too."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "run.json").write_text('{"earlier": {"end": "done"}}')
    leaving = "import subprocess as s; x = s.Popen(['sleep', '60'])\n"
    leaving += "open('{}', 'w').write(str(x.pid))"
    codes = {
        "hangs": "import subprocess, sys; subprocess.run(['sleep', '60'])",
        "fails": "raise SystemExit('no such thing')",
        "stops": f"import sys; sys.exit({run.CUT})",
        "works": leaving.format(tmp_path / "left"),
    }

    def command(part, *_):
        return [sys.executable, "-S", "-c", codes[part.name]]

    monkeypatch.setattr(run, "command", command)
    begun = time.monotonic()
    parts = [Part("hangs", 1), Part("gone", 9, ("no_such_package",))]
    parts += [Part(name, 20) for name in ("fails", "stops", "works")]
    ends = run.run(parts, folder, 1.5, tiny=True)
    assert time.monotonic() - begun < 60
    assert [end["end"] for end in ends.values()] == [
        "cut",
        "left out",
        "failed",
        "cut",
        "done",
    ]
    assert ends["fails"]["said"] == "no such thing (fails.log, status 1)"
    assert "was killed at the end of its share" in ends["hangs"]["said"]
    assert ends["gone"]["missing"] == ["no_such_package"]
    assert "in wait" in (folder / "hangs.log").read_text()
    assert read(folder, "run") == {"earlier": {"end": "done"}} | ends
    assert ends_soon((tmp_path / "left").read_text())


def is_running(process):
    status = Path("/proc", process, "status")
    return status.exists() and "State:\tZ" not in status.read_text()


def ends_soon(process):
    until = time.monotonic() + 30
    while is_running(process) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_running(process)


def test_no_part_outlives_the_command(tmp_path):
    code = f"""
from pathlib import Path
from benchmarks.on_gpu import parts, run
code = "import os; print(os.getpid()); os.execlp('sleep', 'sleep', '60')"
run.command = lambda *_: [run.sys.executable, "-uSc", code]
run.run([parts.Part("a", 1)], Path({str(tmp_path)!r}), 1, tiny=True)
"""
    root, log = Path(__file__).parents[2], tmp_path / "a.log"
    command = subprocess.Popen([sys.executable, "-c", code], cwd=root)
    until = time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    part = log.read_text().strip()
    assert is_running(part)
    command.terminate()
    assert command.wait(60) == 1
    assert ends_soon(part)


def test_a_failed_test_is_of_its_operation():
    passed, failed = {"outcome": "passed"}, {"outcome": "failed"}
    outcomes = {"test_compress[a]": passed, "test_what_workers_sent_may[b]": failed}
    assert verdicts(outcomes, complete=False) == {
        "compress": None,
        "average_and_recompress": False,
    }
    outcomes = {"test_in_place[a]": failed, "test_averages[b]": passed}
    assert verdicts(outcomes, complete=True) == {
        "compress": False,
        "average_and_recompress": True,
    }
    outcomes = {"test_the_optimizer_computes_the_same[a]": failed}
    assert not any(verdicts(outcomes, complete=True).values())


@pytest.mark.parametrize("status", list(pytest.ExitCode))
def test_a_suite_that_was_not_run_has_failed(tmp_path, monkeypatch, status):
    """Also where its files cannot be read, which pytest calls an interruption."""
    monkeypatch.setattr(pytest, "main", lambda *_, **__: status)

    def suite(seconds):
        right.run_suite("xla", TINY, Record(tmp_path / "right.json", seconds))

    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        suite(60)
    else:
        with pytest.raises(SystemExit, match="The tests of xla were not run"):
            suite(60)
    suite(0)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('===== ERROR SUMMARY: 2 errors')", "ERROR SUMMARY: 2 errors; {}0"),
        ("raise SystemExit(5)", "{}5; see the log"),
    ],
)
def test_the_sanitizer_sees_each_array_by_itself(tmp_path, monkeypatch, code, said):
    command = tmp_path / "compute-sanitizer"
    alone = "assert os.environ['XLA_PYTHON_CLIENT_ALLOCATOR'] == 'platform'"
    command.write_text(f"#!{sys.executable}\nimport os\n{alone}\n{code}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = right.sanitize(TINY, Record(tmp_path / "right.json", 60))
    assert found == said.format("its tests ended with ")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (
            "print('580.1, 81559 MiB, 700.00 W, 1980 MHz\\n' * 2)",
            {
                "driver_version": "580.1",
                "memory.total": "81559 MiB",
                "power.limit": "700.00 W",
                "clocks.max.sm": "1980 MHz",
            },
        ),
        ("raise SystemExit('no driver')", {"nvidia-smi": "ended with 1: no driver"}),
    ],
)
def test_the_driver_tells_the_first_gpu_with_units(tmp_path, monkeypatch, code, found):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!{sys.executable} -S\n{code}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.driver() == found


def test_a_folder_is_of_one_kind_of_device(tmp_path):
    assert device(TINY, tmp_path) == jax.devices()[0]
    Record(tmp_path / "facts.json", 1).write(device_kind="NVIDIA H100")
    with pytest.raises(
        SystemExit, match=r"on NVIDIA H100, and this is cpu: give --out"
    ):
        device(TINY, tmp_path)


def test_the_peer_is_measured_beside_the_fastest_right_attention(tmp_path):
    assert fastest(tmp_path) == "xla"
    timed = [("xla", 10.0), ("cudnn", 20.0)]
    steps = [{"rows": [
        {"attention": name, "examples_per_second": rate, "length": 128}
        for name, rate in timed
    ]}]  # fmt: skip
    for attention, expected in (({"right": True}, "cudnn"), ({"right": False}, "xla")):
        Record(tmp_path / "model.json", 1).write(steps=steps, attention=attention)
        assert fastest(tmp_path) == expected


def test_attention_has_no_error_where_it_is_the_same(monkeypatch):
    xla = model.results_of
    monkeypatch.setattr(model, "results_of", lambda name: xla("xla"))
    monkeypatch.setattr(model, "HEADS", 2)
    with jax.numpy_dtype_promotion("standard"):  # as without pytest
        found = model.attention_errors(16)
    assert found["right"]
    assert found["errors"]["xla"] == found["errors"]["cudnn"]
    assert all(1e-4 < error < 2e-2 for error in found["errors"]["xla"])


class Clock(Record):
    """A record whose time is over after some steps."""

    def __init__(self, file, steps):
        super().__init__(file, 1e9)
        self.steps = steps

    @property
    def left(self):
        self.steps -= 1
        return 0.0 if self.steps < 0 else 1e9


@pytest.mark.parametrize(
    "arm", ["Adam", pytest.param("1-bit Adam", marks=pytest.mark.slow)]
)
def test_a_training_that_was_cut_goes_on_as_if_it_had_not_been(tmp_path, arm):
    plan = learning.plan_of(TINY)
    case = wanted(plan, {})[0]._replace(arm=arm)
    corpus = tuple(DOCS / name for name in TINY.corpus)

    def train(folder, steps):
        folder.mkdir(exist_ok=True)
        flags = learning.flags_of(plan.tasks[case.task], case, folder, corpus)
        clock = Clock(folder / "a.json", steps)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return learning.train(flags, plan, case, clock)

    whole = train(tmp_path / "whole", 99)
    with pytest.raises(OutOfTimeError):
        train(tmp_path / "cut", 2)
    assert (tmp_path / "cut" / learning.STATE).exists()
    assert train(tmp_path / "cut", 99) == whole
    assert not (tmp_path / "cut" / learning.STATE).exists()


def test_batches_are_epochs_of_all_windows():
    windows = [np.array([i]) for i in range(6)]
    batches = learning.Batches(windows, 3, seed=1)
    epoch = np.concatenate([batches[0], batches[1]]).ravel()
    assert sorted(epoch) == list(range(6))
    following = np.concatenate([batches[2], batches[3]]).ravel()
    assert sorted(following) == list(range(6))
    assert (epoch != following).any()


def test_the_sizes_of_a_gpu_are_those_of_the_study():
    assert learning.plan_of(SIZES) == read_plan(DOCS / "studies" / "on-gpu.toml")


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_memory_is_taken_at_once_and_left_for_pytorch(tmp_path, part):
    """BERT-Large at 512 tokens is one piece of 36 GB beside arguments of 4."""
    variables = run.environment(part, tmp_path, tiny=False)
    assert variables["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    share = float(variables["XLA_CLIENT_MEM_FRACTION"])
    beside_torch = part.name in ("fast", "peer")
    assert 45e9 < share * 80e9 < (80e9 - 30e9 if beside_torch else 76e9)


def test_an_operation_that_fails_is_told_and_the_others_are_measured(monkeypatch):
    """XLA's of all sizes are measured before the first of Mosaic's."""

    def broken(value, error, *, implementation, **_):
        if implementation == TINY.mosaic:
            raise RuntimeError("illegal address\nand more")
        return jnp.zeros(2), jnp.zeros(2), value + error

    monkeypatch.setattr("pallas_kernels.compress", broken)
    with jax.numpy_dtype_promotion("standard"):
        *_, found = fast.in_order(replace(TINY, kernels=(1024, 2048)))
    text = kernels_text(found)
    rows = [(row.operation, row.size, row.implementation) for row in found.rows]
    assert rows == [
        (name, size, implementation)
        for size in (1024, 2048)
        for name, implementation in (
            ("Adam's update", "optax"),
            ("compress with momentum", "xla"),
        )
    ]
    for size in ("1,024", "2,048"):
        what = f"compress with momentum, donated, {size}, mosaic_interpreted"
        assert f"- {what}: not measured: illegal address\n" in text + "\n"
