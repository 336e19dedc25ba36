"""The speed of BERT: forward, backward and whole step, beside Hugging Face's.

    python -m benchmarks.bert --models base large --json bert.json --page docs/bert.md
    python -m benchmarks.bert --compile h200 --models large --json bert-h200.json

The step is `train.pretrain`'s, of one worker, but for a loop over the layers, which
`--no-scan` unrolls as there: dropout, both losses, clipping, AdamW or 1-bit AdamW,
skipping of steps that are not finite; float32 parameters, computed with in `--dtype`.
Sequences are full, random tokens, 15 % of them predicted.

*Forward* is the loss with dropout, nothing kept for a gradient. *Backward* is the loss
and its gradients, less the forward pass in the same round. *Step* is all of it and the
update. FLOP are the model's own (`train.plan.flops`): recomputing for the backward
pass, dropout and the optimizer's arithmetic count nothing. The peak that they are a
share of is a square matrix product of the same dtype, timed in the same rounds.

In each round everything of a length takes its turn; of each, the first two calls, which
compile, are not timed, and then as many calls as `--calls` are started one after
another and waited for. Times are medians of rounds with quartiles, ratios medians of
each round's.

PyTorch and transformers are measured beside it where they are installed: Hugging Face's
`BertForPreTraining`, scaled-dot-product attention without a mask and without dropout
of probabilities, autocast to the same dtype, fused AdamW and clipping, eager and by
`torch.compile`. It projects all positions to the vocabulary, not the masked ones alone;
its FLOP are counted with them.

With `--compile` nothing is timed: the steps are compiled for a GPU that is not there,
and their memory and kernels counted. That needs XLA's compiler for NVIDIA GPUs, and
cuDNN's library for `--attentions cudnn`, as pip installs them; no driver.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import jax

from benchmarks.bert.compile import compile_all
from benchmarks.bert.config import check
from benchmarks.bert.measure import measure
from benchmarks.bert.report import text, write
from benchmarks.page import fill
from train.core.errors import InputError

if TYPE_CHECKING:
    from benchmarks.bert.config import Config


def main(config: Config) -> None:
    """Measures or compiles, prints a table and writes the files that are asked for.

    Raises:
      SystemExit: The flags cannot be used, or it does not compile.
    """
    try:
        run(config)
    except InputError as error:
        raise SystemExit(f"error: {error}") from error


def run(config: Config) -> None:
    """`main`, with an exception for what the user can put right.

    Raises:
      InputError: The flags cannot be used, or it does not compile.
    """
    check(config)
    # Before JAX takes the GPU, of whose memory PyTorch needs some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    page = config.page and config.page.read_text("utf-8")
    if page:  # Its faults are said before anything is measured.
        fill(page, config.compile or jax.default_backend(), "")
    said = ""
    for results in compile_all(config) if config.compile else measure(config):
        # After each length, so that what has been measured is there if the next fails.
        write(results, config.json, config.page, page)
        said = text(results)
    print(said)
