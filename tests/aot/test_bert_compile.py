"""BERT-Large's training step compiled for one H200, on a machine without any.

`make test-aot` installs the compiler. These prove memory and kernels, not speed.
"""

import importlib.util
import os

import pytest

from benchmarks.bert.compile import compile_all
from benchmarks.bert.config import Config
from train.plan.gpu_program import BACKWARD, FORWARD, PRODUCT

if "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ:
    pytest.skip("run by make test-aot", allow_module_level=True)

LAYERS = 24
HEADS = 3 * 4
"""Products of the pooler and the heads: two, and that to the vocabulary, and that of
the next sentence, each forward and for both of its gradients."""


def compiled(attention, remat):
    config = Config(
        compile="h200",
        models=("large",),
        seqs=(512,),
        batch=32,
        attentions=(attention,),
        remats=(remat,),
    )
    (found,) = compile_all(config)
    assert not found.skipped
    (case,) = found.cases
    return case


def check_memory(case, limit):
    memory = case["memory"]
    assert memory["fits"]
    assert memory["together"] < limit
    # Parameters and both moments, float32, updated in place.
    assert memory["arguments"] == pytest.approx(12 * 336e6, rel=0.01)
    assert memory["outputs"] < 1.001 * memory["in_place"]


def test_a_layer_that_is_recomputed_keeps_its_input_in_bfloat16():
    case = compiled("xla", "layer")
    check_memory(case, 15e9)
    assert case["kept"] == {"bf16": 2 * LAYERS * 32 * 512 * 1024}
    # Four with weights and two of attention; twice as many for the gradients; and
    # once more what is recomputed.
    assert case["kernels"][PRODUCT] == LAYERS * (3 * 6 + 6) + HEADS
    assert FORWARD not in case["kernels"]


@pytest.mark.skipif(
    not (
        importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")
    ),
    reason="needs cuDNN's library: pip install --no-deps nvidia-cudnn-cu13",
)
def test_cudnn_computes_attention_once_forward_and_once_backward():
    case = compiled("cudnn", "none")
    check_memory(case, 40e9)
    assert case["kernels"][PRODUCT] == LAYERS * 3 * 4 + HEADS
    assert case["kernels"][FORWARD] == LAYERS
    assert case["kernels"][BACKWARD] == LAYERS
    # Scores of all pairs of tokens would be the largest of all: 6.4 GB in bfloat16.
    assert sum(case["kept"].values()) < 30e9
