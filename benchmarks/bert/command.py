"""How fast BERT computes: forward, backward and whole step, beside Hugging Face's.

    python -m benchmarks.bert --models base large --json bert.json --page docs/bert.md
    python -m benchmarks.bert --compile h200 --models large --json bert-h200.json

The step is `train.pretrain`'s, of one worker, but for a loop over the layers, which
`--no-scan` unrolls as there: dropout, both losses, clipping, AdamW or 1-bit AdamW,
skipping of steps that are not finite; float32 parameters, computed with in `--dtype`.
Sequences are full, random tokens, 15 % of them predicted.

*Forward* is the loss with dropout, nothing kept for a gradient. *Backward* is the loss
and its gradients, less the forward pass in the same round. *Step* is all of it and the
update. FLOP are the model's own (`benchmarks.bert.flops`): recomputing for the backward
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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.page import fill
from models.config import SIZES, Attention, Remat
from train.core.errors import InputError, writable

Pass = Literal["forward", "backward", "step"]


@dataclass(frozen=True)
class Config:
    """What is measured."""

    models: tuple[str, ...] = ()
    """Sizes by name; default: mini, on a GPU large."""
    seqs: tuple[int, ...] = (128, 512)
    """Tokens of a sequence."""
    batch: int | None = None
    """Sequences of a batch; default: as many as have 1024 tokens, on a GPU 16384."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Default: float32, on a GPU bfloat16."""
    attentions: tuple[Attention, ...] = ()
    """Default: xla, on a GPU xla and cudnn."""
    remats: tuple[Remat, ...] = ("none",)
    """What the backward pass recomputes: none, attention, dots, layer."""
    scan: bool = True
    """Whether the layers are one loop, which compiles in the time of one of them."""
    passes: tuple[Pass, ...] = ("forward", "backward", "step")
    """What is timed."""
    optimizer: Literal["adam", "onebit_adam"] = "adam"
    """That of the step."""
    peers: bool = True
    """Whether PyTorch is measured where it is installed."""
    repeats: int = 7
    """Rounds."""
    calls: int | None = None
    """Calls that are timed together; default: 1, on a GPU 5."""
    compile: Literal["h100", "h200"] | None = None
    """A GPU to compile for instead of measuring."""
    json: Path | None = None
    """Where the results go."""
    page: Path | None = None
    """The Markdown page between whose marks the table goes."""


def check(config: Config) -> None:
    """Refuses what cannot be measured.

    Raises:
      SystemExit: It says what to change.
    """
    unknown = [name for name in config.models if name not in SIZES]
    if unknown:
        raise SystemExit(f"--models knows {', '.join(SIZES)}, not {unknown[0]}.")
    counts = [config.repeats, *config.seqs, *(config.batch, config.calls)]
    if not config.seqs or min(n for n in counts if n is not None) < 1:
        raise SystemExit("--seqs, --batch, --repeats and --calls must be at least 1.")
    if not config.passes or not config.remats:
        raise SystemExit("--passes and --remats need one at least.")
    if config.json:
        try:
            with writable(config.json, "--json"):
                config.json.open("a").close()
        except InputError as error:
            raise SystemExit(str(error)) from error
    if config.page and not config.page.is_file():
        raise SystemExit(f"--page {config.page}: there is no such file.")


def main(config: Config) -> None:
    """Measures or compiles, prints a table and writes the files that are asked for."""
    check(config)
    if config.compile:
        from benchmarks.bert.compile import compile_all as run
    else:
        # Before JAX takes the GPU, of whose memory PyTorch needs some.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        from benchmarks.bert.measure import measure as run
    from benchmarks.bert import report as bert_report

    page = config.page and config.page.read_text("utf-8")
    if page:  # What is wrong with it is said before anything is measured.
        import jax

        fill(page, config.compile or jax.default_backend(), "")
    said = ""
    for results in run(config):
        # After each length, so that what has been measured is there if the next fails.
        bert_report.write(results, config.json, config.page, page)
        said = bert_report.text(results)
    print(said)
