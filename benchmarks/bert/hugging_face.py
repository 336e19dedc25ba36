"""Hugging Face's PyTorch BERT, which `benchmarks.bert` measures beside this one."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.bert.programs import CLIP, PEAK, WEIGHT_DECAY, make_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.bert.programs import Shape
    from models import BertConfig

IGNORED = -100
"""The label of a token that is not predicted."""


def why_no_torch() -> str | None:
    """The reason why PyTorch cannot be compared with; None where it can."""
    missing = [
        name
        for name in ("torch", "transformers")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        return f"PyTorch: not measured: {' and '.join(missing)} not installed"
    return None


class HuggingFace:
    """`BertForPreTraining` with the sizes of ours, its optimizer and its inputs.

    Args:
      config: The sizes of ours.
      shape: The size of the computation.
      platform: JAX's name of the platform, whose device is used.

    Raises:
      RuntimeError: PyTorch does not see the GPU that JAX sees.
    """

    def __init__(self, config: BertConfig, shape: Shape, platform: str):
        # In no extra: a type checker does not know them.
        torch, transformers = map(importlib.import_module, ("torch", "transformers"))
        if platform == "gpu" and not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no GPU; install a build of it for CUDA.")
        self.torch = torch
        self.device = "cuda" if platform == "gpu" else "cpu"
        torch.manual_seed(0)
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        # As JAX multiplies float32 on GPUs.
        torch.set_float32_matmul_precision("high")
        sizes = transformers.BertConfig(**_sizes(config))
        self.model = transformers.BertForPreTraining(sizes).to(self.device)
        self.model.train()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=PEAK, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.autocast = functools.partial(
            torch.autocast,
            self.device,
            torch.bfloat16,
            enabled=shape.dtype == "bfloat16",
        )
        self.inputs = {
            name: torch.from_numpy(np.asarray(value, np.int64)).to(self.device)
            for name, value in _inputs(config, shape).items()
        }

    def calls(self, *, compiled: bool) -> dict[str, Callable[[], Any]]:
        """The programs by name: forward, gradients, step.

        Args:
          compiled: Whether by `torch.compile`, from the first call on.

        Returns:
          Functions that start it.
        """

        @functools.cache
        def model() -> Any:
            return self.torch.compile(self.model) if compiled else self.model

        def loss() -> Any:
            with self.autocast():
                return model()(**self.inputs).loss

        def forward() -> Any:
            with self.torch.no_grad():
                return loss()

        def gradients() -> Any:
            self.optimizer.zero_grad(set_to_none=True)
            value = loss()
            value.backward()
            return value.detach()

        def step() -> Any:
            value = gradients()
            self.torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
            self.optimizer.step()
            return value

        return {"forward": forward, "gradients": gradients, "step": step}

    def wait(self, result: Any) -> Any:
        """Waits until a call is done."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return result


def _sizes(config: BertConfig) -> dict[str, Any]:
    """The sizes of ours by Hugging Face's names."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.layer_norm_epsilon,
        "attn_implementation": "sdpa",
    }


def _inputs(config: BertConfig, shape: Shape) -> dict[str, Any]:
    """The batch of ours by the names of the model's arguments."""
    batch = make_batch(config, shape)
    labels = np.full(batch.token_ids.shape, IGNORED, np.int64)
    np.put_along_axis(labels, batch.masked_positions, batch.masked_labels, axis=1)
    return {
        "input_ids": batch.token_ids,
        "token_type_ids": batch.token_types,
        "labels": labels,
        "next_sentence_label": batch.next_sentence_labels,
    }


def free() -> None:
    """Frees the memory and the compiled programs of models that are gone."""
    torch = importlib.import_module("torch")
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
