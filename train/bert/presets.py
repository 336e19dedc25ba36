"""The hyperparameters of 1-bit Adam's published pre-trainings, by name.

Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, 2021, section 7.1 and
table 1: batches of 4,096, a peak of 4e-4 after 12,500 steps, a fall by 0.99 in 520
steps, the steps and the freeze of both phases. It does not say how the learning rate
goes in the phase of 512 tokens; that is `bert_large.json` of DeepSpeedExamples.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from train.bert.config import PretrainConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from models.config import Size
    from train.bert.config import Preset


def _published(
    preset: Preset, model: Size, *, steps: int, freeze_step: int, long_steps: int
) -> PretrainConfig:
    return PretrainConfig(
        preset=preset,
        model=model,
        vocab_size=30522,
        seq=128,
        batch=4096,
        steps=steps,
        learning_rate=4e-4,
        warmup_steps=12_500,
        decay_every=520,
        freeze_step=freeze_step,
        weight_decay=0.01,
        clip=1.0,
        long_seq=512,
        long_steps=long_steps,
        long_learning_rate=1e-5,
        long_warmup_steps=150,
        long_decay_rate=0.9,
        long_decay_every=150,
        long_freeze_step=1500,
    )


PRESETS: Mapping[Preset, PretrainConfig] = MappingProxyType(
    {
        "bert-base": _published(
            "bert-base", "base", steps=118_000, freeze_step=16_000, long_steps=22_000
        ),
        "bert-large": _published(
            "bert-large", "large", steps=152_000, freeze_step=23_000, long_steps=10_000
        ),
    }
)
"""Flags by the names of their presets."""
