import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.bert.cases import Shape, make_batch, model_config, optimizer, programs
from benchmarks.bert.command import Config, check
from benchmarks.bert.flops import OF_FORWARD, forward_flops
from benchmarks.bert.kernels import kept, kernels
from benchmarks.bert.measure import _baseline, _of_pass
from benchmarks.bert.report import text
from benchmarks.bert.rows import Peak, Results, Row
from benchmarks.bert.runners import COMPILED, EAGER, OURS, Runner
from benchmarks.page import fill
from models import SIZES
from train.bert.objective import abstract_params
from train.core.mesh import make_mesh

ROOT = Path(__file__).parents[2]
BATCH, LENGTH, REPEATS = 2, 16, 2
NO_TORCH = not all(map(importlib.util.find_spec, ("torch", "transformers")))


def run(*flags):
    command = [sys.executable, "-m", "benchmarks.bert", *map(str, flags)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    file, page = folder / "bert.json", folder / "bert.md"
    page.write_text("before\n<!-- cpu -->\nold\n<!-- end of cpu -->\nafter\n")
    flags = f"--models tiny --seqs {LENGTH} --batch {BATCH} --repeats {REPEATS} "
    flags += f"--attentions xla cudnn --no-peers --json {file} --page {page}"
    command = [sys.executable, "-m", "benchmarks.bert", *flags.split()]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done, json.loads(file.read_text()), page.read_text()


def products(jaxpr, times=1):
    """FLOP of the matrix products that a program is traced to."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            size = math.prod(shape[axis] for axis in contracted)
            total += times * 2 * size * math.prod(equation.outvars[0].aval.shape)
        turns = equation.params.get("length", 1)
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "jaxpr"):
                total += products(inner.jaxpr, times * turns)
            elif hasattr(inner, "eqns"):
                total += products(inner, times * turns)
    return total


@pytest.mark.parametrize("scan", [True, False])
def test_flops_are_those_of_the_programs_products(scan):
    shape = Shape("tiny", LENGTH, BATCH, "float32")
    config = model_config(shape, "xla", "none", scan=scan)
    made = programs(config, optimizer("adam"), make_mesh(1))
    args = abstract_params(config), make_batch(config, shape), np.uint32(0)
    forward = BATCH * forward_flops(config, LENGTH, shape.predictions)
    counted = {
        name: products(jax.make_jaxpr(getattr(made, name))(*args).jaxpr)
        for name in ("forward", "gradients")
    }
    assert counted["forward"] == forward
    backward = counted["gradients"] - counted["forward"]
    assert backward == OF_FORWARD["backward"] * forward


def test_every_pass_has_a_row_that_follows_from_its_times(benchmark):
    _, stored, _ = benchmark
    rows = stored["rows"]
    assert [row["name"] for row in rows] == ["forward", "backward", "step"]
    peak = stored["peaks"][0]["tflops_per_second"][1]
    for row in rows:
        assert len(row["seconds"]) == REPEATS
        median = np.median(row["seconds"])
        flops = BATCH * forward_flops(SIZES["tiny"], LENGTH, row["predictions"])
        assert (
            row["flops"]
            == {"forward": 1, "backward": 2, "step": 3}[row["name"]] * flops
        )
        assert row["milliseconds"][1] == pytest.approx(1e3 * median)
        assert row["examples_per_second"] == pytest.approx(BATCH / median)
        assert row["of_peak"] == pytest.approx(row["flops"] / median / 1e12 / peak)
        assert row["speed_up"] == [1, 1, 1]
    forward, _, step = rows
    parameters = sum(x.size for x in jax.tree.leaves(abstract_params(SIZES["tiny"])))
    # Parameters and two moments, and more for the gradients.
    assert step["held_bytes"] > 4 * 4 * parameters > forward["held_bytes"]


def test_what_does_not_run_here_is_said(benchmark):
    done, stored, page = benchmark
    asked, cudnn = stored["skipped"]
    assert asked == "PyTorch: not asked for"
    assert cudnn.startswith(f"tiny, {BATCH} x {LENGTH}, attention cudnn, remat none")
    assert "not measured: cuDNN's attention computes in bfloat16" in cudnn
    for line in (asked, cudnn):
        assert line in done.stderr.splitlines()
        assert f"- {line}" in done.stdout.splitlines()
        assert line in page


def test_the_json_and_the_page_hold_what_is_printed(benchmark):
    done, stored, page = benchmark
    rows = [Row(**row) for row in stored["rows"]]
    peaks = [Peak(**peak) for peak in stored["peaks"]]
    results = Results(**(stored | {"rows": rows, "peaks": peaks}))
    table = text(results)
    assert table + "\n" == done.stdout
    assert page == fill(
        "before\n<!-- cpu --><!-- end of cpu -->\nafter\n", "cpu", table
    )
    assert {"platform": "cpu", "versions": stored["versions"]}.items() <= stored.items()
    assert stored["versions"]["jax"] == jax.__version__


def test_backward_is_less_the_forward_pass_of_its_round():
    taken = {"forward": [1.0, 2.0], "gradients": [4.0, 6.0]}
    assert _of_pass("backward", taken) == [3.0, 4.0]
    assert _of_pass("forward", taken) == [1.0, 2.0]


def test_the_baseline_is_pytorch_where_it_runs():
    def baseline(*names):
        runners = [Runner(name, "", "", 1, {}, id, {}) for name in names]
        return names[_baseline(runners)]

    assert baseline(EAGER, COMPILED, OURS) == COMPILED
    assert baseline(EAGER, OURS) == EAGER
    assert baseline(OURS, OURS) == OURS


@pytest.mark.skipif(NO_TORCH, reason="needs torch and transformers")
def test_hugging_face_computes_the_same_sizes():
    from benchmarks.bert.peers import HuggingFace

    shape = Shape("tiny", LENGTH, BATCH, "float32")
    config = model_config(shape, "xla", "none", scan=False)
    peer = HuggingFace(config, shape, "cpu")
    ours = jax.tree.leaves(abstract_params(config))
    assert sum(p.numel() for p in peer.parameters) == sum(x.size for x in ours)
    labels = peer.inputs["labels"]
    assert int((labels >= 0).sum()) == BATCH * shape.predictions
    calls = peer.calls(compiled=False)
    losses = [float(peer.wait(calls["step"]())) for _ in range(3)]
    assert losses[2] < losses[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"models": ("huge",)}, "--models knows tiny, mini"),
        ({"batch": 0}, "--seqs, --batch, --repeats and --calls must be at least 1"),
        ({"passes": ()}, "--passes and --remats need one at least"),
        ({"json": Path("nowhere/a.json")}, "cannot be written to .No such file"),
        ({"json": ROOT / "docs"}, "cannot be written to .Is a directory"),
        ({"page": Path("nowhere.md")}, "--page nowhere.md: there is no such file"),
    ],
)
def test_flags_that_cannot_be_measured_with_are_refused(flags, message):
    with pytest.raises(SystemExit, match=message):
        check(Config(**flags))


def test_a_page_without_marks_is_refused():
    with pytest.raises(SystemExit, match="<!-- gpu --> and <!-- end of gpu -->"):
        fill("<!-- cpu -->\n<!-- end of cpu -->", "gpu", "")


HLO = """\
HloModule jit_step, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  ROOT %add.1 = f32[4]{0} add(%p, %p)
}

%body (arg: (s32[], f32[3,1,2,8,4], bf16[3,2,8,4], f32[3,4])) -> (s32[], f32[3,2,8,4]) {
  %f = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
  %dot = bf16[4]{0} fusion(%x), kind=kCustom, calls=%fused, backend_config={\
"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  ROOT %c = (bf16[4]{0}) custom-call(%f), custom_call_target="__cudnn$fmhaSoftmax"
}

%few (p: f32[4]) -> f32[4] {
  ROOT %copy.1 = f32[4]{0} copy(%p)
}

%many (p: f32[4]) -> f32[4] {
  %copy.2 = f32[4]{0} copy(%p)
  ROOT %copy.3 = f32[4]{0} copy(%copy.2)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %r = f32[4]{0} fusion(%p), kind=kInput, calls=%fused
  %w = (s32[], f32[3,1,2,8,4]{4,3,2,1,0}, bf16[3,2,8,4]{3,2,1,0}, f32[3,5,8]{2,1,0}) \
while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %g = f32[4]{0} custom-call(%w), custom_call_target="__cublas$lt$matmul"
  ROOT %o = f32[4]{0} conditional(%p, %a, %b), true_computation=%few, \
false_computation=%many
}
"""


def test_kernels_are_counted_as_often_as_they_are_started():
    assert kernels(HLO) == {
        "loop fusion": 3,
        "matrix product": 3 + 1,
        "cuDNN attention, forward": 3,
        "reduction fusion": 1,
        "copy": 2,
    }


def test_what_layers_keep_has_axes_for_layers_sequences_and_tokens():
    size = 3 * 2 * 8 * 4
    assert kept(HLO, layers=3, batch=2, length=8) == {"f32": 4 * size, "bf16": 2 * size}
