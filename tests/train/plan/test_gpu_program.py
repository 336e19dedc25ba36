"""Compiled GPU programs are read right, and compiled in processes of their own."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from train.core.errors import InputError
from train.plan import gpu_compiler
from train.plan.gpu_program import (
    InFlight,
    bytes_for_backward,
    in_flight,
    kernels,
    needed_memory,
)

SCHEDULE = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %a2a = ((u32[4,3]{1,0}), u32[4,3]{1,0}) all-to-all-start(%p), channel_id=1
  %get = f32[8]{0} get-tuple-element(%p), index=0
  %a2a-done = u32[4,3]{1,0} all-to-all-done(%a2a), metadata={}
  %gather = (f32[1]{0}, f32[8]{0}) all-gather-start(%fusion.1), channel_id=2
  %wrapped = ((f32[8]{0}), f32[2]{0}) async-start(%p), calls=%reduce-scatter.3
  %fusion.2 = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused
  %wrapped-done = f32[2]{0} async-done(%wrapped)
  %loop = (f32[8]{0}) while(%fusion.2), condition=%c, body=%b
  %gather-done = f32[8]{0} all-gather-done(%gather), metadata={}
  ROOT %sum = f32[8]{0} all-reduce(%gather-done), to_apply=%add
}
"""

STEP = """\
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


def test_work_is_counted_while_a_collective_is_in_flight():
    assert in_flight(SCHEDULE) == [
        InFlight("all-to-all", "u32[4,3]", False, 0),
        InFlight("reduce-scatter", "f32[2]", True, 1),
        InFlight("all-gather", "f32[8]", True, 2),
        InFlight("all-reduce", "f32[8]", False, 0),
    ]


def test_kernels_are_counted_as_often_as_they_are_started():
    assert kernels(STEP) == {
        "loop fusion": 3,
        "matrix product": 3 + 1,
        "cuDNN attention, forward": 3,
        "reduction fusion": 1,
        "copy": 2,
    }


def test_layers_keep_arrays_with_axes_for_layers_sequences_and_tokens():
    size = 3 * 2 * 8 * 4
    kept = bytes_for_backward(STEP, layers=3, batch=2, length=8)
    assert kept == {"f32": 4 * size, "bf16": 2 * size}


def test_memory_counts_outputs_in_place_once():
    array = jax.ShapeDtypeStruct((1000,), jnp.float32)
    for donated in ((), (0,)):
        function = jax.jit(lambda x: x + 1, donate_argnums=donated)
        needed = needed_memory(function.lower(array).compile())
        assert needed["together"] == (4000 if donated else 8000) + needed["temporaries"]


@dataclasses.dataclass(frozen=True)
class Config:
    number: int
    file: Path | None = None


MODULE = """
import dataclasses, os
from train.plan import gpu_compiler
@dataclasses.dataclass
class Config:
    number: int
    file: str | None = None
def double(config):
    assert "autotune_level=0" in os.environ["XLA_FLAGS"]
    assert config.number
    if config.number < 0:
        os.kill(os.getpid(), -config.number)
    return {"twice": 2 * config.number, "file": config.file}
gpu_compiler.serve(Config, double)
"""


def test_a_module_compiles_in_a_process_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "doubling.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    value = gpu_compiler.run("doubling", Config(7, tmp_path))
    assert value == {"twice": 14, "file": None}
    for number, why in (0, "is above"), (-9, "was killed by SIGKILL"):
        match = rf"it does not compile \(.+ {why}\); where memory .* give fewer GPUs"
        with pytest.raises(InputError, match=match):
            gpu_compiler.run("doubling", Config(number))


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(gpu_compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=f"jax-cuda13-plugin=={jax.__version__} "):
        gpu_compiler.check_installed()
