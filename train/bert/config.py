"""The flags of `python -m train.pretrain`, and which of their values make sense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from models import SIZES
from models.config import Size
from train.core.errors import InputError
from train.core.flags import (
    Changeable,
    Count,
    Factor,
    Freeze,
    FromScratchFlags,
    Natural,
    Positive,
    Seed,
    TransformerFlags,
    check_from_scratch,
    spelling,
)
from train.core.optimizer import Plan
from train.data.flags import CorpusFlags

Preset = Literal["bert-base", "bert-large"]

MIN_LENGTH = 8
"""Tokens of the shortest sequence: two segments and their three special tokens."""

DECAY_RATE = 0.99
"""Factor of an exponential fall of the learning rate, where none is given."""


@dataclass(frozen=True, kw_only=True)
class LengthPlan(Plan):
    """The plan of a phase whose sequences have one length.

    The phase begins with the parameters that the one before left and with an optimizer
    that is new: moments, schedule and freeze count its own steps. DeepSpeedExamples
    begin the schedule anew likewise (`--rewarmup`), and the paper's second phase has a
    warm-up of its own.

    Attributes:
      seq: Tokens a sequence.
    """

    seq: int


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TransformerFlags, CorpusFlags, FromScratchFlags):
    """Pre-trains BERT on text, by workers that exchange one bit a parameter."""

    preset: Preset | None = None
    """Hyperparameters of 1-bit Adam's paper, for the flags that are not given."""
    vocab: Path | None = None
    """A vocab.txt of word pieces; default: one trained on the corpus."""
    vocab_size: Count | None = None
    """Word pieces of a vocabulary trained on the corpus; default: 4,096."""
    model: Size = "tiny"
    """Size of the BERT."""
    pre_norm: bool = False
    """Put a LayerNorm before each sublayer instead of after it."""
    batch: Count = 32
    """Sequences a step, of all workers together."""
    seq: int = 64
    """Tokens a sequence."""
    whole_words: bool = False
    """Mask all pieces of a word together."""
    seed: Seed = 0
    """Decides the parameters, the order of the text, its masks and the dropout."""
    learning_rate: Positive = 1.5e-3
    """Peak of the learning rate; without --decay-every it falls to a tenth at the
    end."""
    decay_rate: Factor | None = None
    """Factor by which the learning rate falls in --decay-every steps; default: 0.99."""
    decay_every: Count | None = None
    """Steps in which the learning rate falls by --decay-rate, exponentially; default:
    it falls linearly instead, to a tenth at the end."""
    long_seq: int | None = None
    """Tokens a sequence in a second phase, whose moments, schedule and freeze begin
    anew; default: there is none."""
    long_steps: Changeable[Count | None] = None
    """Training steps of the second phase; default: a ninth of the first's."""
    long_batch: Count | None = None
    """Sequences a step of the second phase; default: the first's."""
    long_accumulate: Count | None = None
    """--accumulate of the second phase; default: the first's."""
    long_learning_rate: Positive | None = None
    """Peak of the learning rate in the second phase; default: the first's."""
    long_warmup_steps: Natural | None = None
    """Steps of the second phase in which its rate rises; default: a tenth of them."""
    long_decay_rate: Factor | None = None
    """--decay-rate of the second phase; default: the first's."""
    long_decay_every: Count | None = None
    """--decay-every of the second phase; default: the first's."""
    long_freeze_step: Freeze | None = None
    """Steps of the second phase before the variance is frozen; default: as in the
    first, by share or auto."""
    out: Changeable[Path] = Path("runs/pretrain")
    """Folder for checkpoints, metrics, vocabulary and picture."""

    @property
    def model_options(self) -> dict[str, Any]:
        """Options of a model beside its size and its vocabulary."""
        return {**super().model_options, "pre_norm": self.pre_norm}

    @property
    def phases(self) -> tuple[LengthPlan, ...]:
        """The phases, all defaults put in."""
        first = self._phase("--", earlier_steps=0)
        if self.long_seq is None:
            return (first,)
        given = {name.removeprefix("long_"): getattr(self, name) for name in _LONG}
        second = replace(
            self,
            steps=max(1, round(self.steps / 9)),
            warmup_steps=None,
            freeze_step="auto" if self.freeze_step == "auto" else None,
        )
        second = replace(second, **{n: x for n, x in given.items() if x is not None})
        return first, second._phase("--long-", earlier_steps=self.steps)

    def _phase(self, prefix: str, earlier_steps: int) -> LengthPlan:
        (plan,) = super().phases
        own = {
            "prefix": prefix,
            "earlier_steps": earlier_steps,
            "decay_rate": DECAY_RATE if self.decay_rate is None else self.decay_rate,
            "decay_every": self.decay_every,
            "seq": self.seq,
        }
        return LengthPlan(**{**vars(plan), **own})

    @property
    def lengths(self) -> dict[str, Any]:
        """The step counts; a longer run keeps the schedule of its first ones."""
        return {**super().lengths, "long_steps": self.long_steps}

    @property
    def fixed(self) -> dict[str, str]:
        """Changeable flags that this run must keep, and what to give instead."""
        # The first phase of two is over, or ends where the second begins.
        return {"steps": "--long-steps"} if self.long_seq else {}


_LONG = [f.name for f in fields(PretrainConfig) if f.name.startswith("long_")]
"""The flags of a second phase."""


def check(config: PretrainConfig) -> None:
    """Refuses values that are out of their range, or contradict each other."""
    check_from_scratch(config)
    if config.preset and not config.corpus:
        raise InputError(
            "--preset is of pre-trainings on gigabytes of text; give --corpus."
        )
    config.model_of(SIZES[config.model])
    longest = SIZES[config.model].max_positions
    phases = config.phases
    for phase in phases:
        if not MIN_LENGTH <= phase.seq <= longest:
            raise InputError(
                f"{phase.prefix}seq must be from {MIN_LENGTH} to {longest}, the "
                f"positions of BERT {config.model}, not {phase.seq}."
            )
    if config.long_seq is None:
        for name in _LONG:
            if getattr(config, name) is not None:
                raise InputError(
                    f"{spelling(name)} is of a second phase, and there is none; give "
                    "--long-seq too."
                )
    if config.long_seq is not None and config.long_seq < config.seq:
        raise InputError(
            f"--long-seq is of a phase of longer sequences; give {config.seq} (--seq) "
            "or more."
        )
    # The second phase has the first's rate where it has none of its own.
    for rate, of in (config.decay_rate, phases), (config.long_decay_rate, phases[1:]):
        if rate is not None and not any(phase.decay_every for phase in of):
            prefix = of[0].prefix
            raise InputError(
                f"{prefix}decay-rate is of an exponential fall, and this one is "
                f"linear; give {prefix}decay-every too, or {prefix}decay-rate None."
            )
    if config.vocab and config.vocab_size is not None:
        raise InputError(
            "--vocab-size is of a vocabulary trained on the corpus; drop it or --vocab."
        )


def without_second_phase(config: PretrainConfig) -> PretrainConfig:
    """The flags without those of a second phase."""
    return replace(config, **dict.fromkeys(_LONG))


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
        checkpoint_every=500,
        log_every=50,
        eval_every=500,
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
"""The flags of 1-bit Adam's published pre-trainings, by name.

Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, 2021, section 7.1 and
table 1: batches of 4,096, a peak of 4e-4 after 12,500 steps, a fall by 0.99 in 520
steps, the steps and the freeze of both phases. It does not say how the learning rate
goes in the phase of 512 tokens; that is `bert_large.json` of DeepSpeedExamples.
"""
