"""The flags of `python -m train.squad`, and which of their values make sense."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from models.config import Size
from train.core.errors import InputError
from train.core.exchange import WarmupBits
from train.core.flags import (
    Changeable,
    Count,
    Freeze,
    NotNegative,
    Positive,
    Range,
    Seed,
    TrainingFlags,
    TransformerFlags,
    check_flags,
)
from train.squad.predict import MAX_ANSWER
from train.squad.windows import STRIDE

MODULE = "train.squad"
"""The command of these flags."""

EPOCHS = 2.0
"""Epochs by default."""

FREEZE = 0.25
"""Share of the steps after which a variance is frozen by default."""


@dataclass(frozen=True, kw_only=True)
class SquadConfig(TransformerFlags, TrainingFlags):
    """Fine-tunes BERT to find answers in texts, and writes its answers."""

    # Files may have moved when a run goes on; their contents are compared elsewhere.
    train: Changeable[Path | None] = None
    """A SQuAD file, v1.1 or v2.0, to learn from; a run that goes on has its own."""
    dev: Changeable[Path | None] = None
    """A SQuAD file to answer and to be scored on; default: the one learnt from."""
    predict: Changeable[Path | None] = None
    """A SQuAD file to answer without training, by the weights of --start or, with
    --resume, of the run in --out; its answers need not be known, and there are no
    scores."""
    start: Path | None = None
    """Source of the weights: a folder of Hugging Face's config.json and
    model.safetensors, or of a run of train.pretrain or train.squad; a head for spans
    is taken too, where there is one; default: random ones."""
    vocab: Path | None = None
    """A vocab.txt; default: the one in --start."""
    model: Size | None = None
    """Size of a BERT that starts with random weights; default: tiny."""
    freeze_step: Freeze | None = None
    """Steps before 1-bit Adam, LAMB or 0/1 Adam freezes its variance; auto: once it is
    stable; default: a quarter of the steps, not before the learning rate has risen."""
    warmup_bits: WarmupBits = 32
    """Bits a value of the gradients that 1-bit Adam exchanges before the freeze; 32 is
    the exact mean."""
    epochs: Positive | None = None
    """Times that every window is learnt from; default: 2."""
    steps: Count | None = None
    """Training steps, in place of --epochs."""
    batch: Count = 96
    """Windows a step, of all workers together."""
    seq: Annotated[int, Range(least=8)] = 384
    """Tokens a window, the question included."""
    stride: Count = STRIDE
    """Word pieces between the starts of two windows over a text, at most half of those
    that a window has room for, so that no answer is cut in all of them."""
    seed: Seed = 0
    """Decides the new parameters, the order of the windows and the dropout."""
    learning_rate: Positive = 3e-5
    """Peak of the learning rate; it falls to a tenth at the end."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, of all parameters but biases and LayerNorms."""
    max_answer: Changeable[Count] = MAX_ANSWER
    """Word pieces of the longest answer."""
    null_threshold: Changeable[float] = 0.0
    """In v2.0, a question is left without an answer where the score of none is higher
    than that of the best answer by more than this."""
    out: Changeable[Path] = Path("runs/squad")
    """Folder for checkpoints, metrics, predictions and the model."""

    def num_steps(self, windows: int) -> int:
        """The steps to train: --steps, or those that --epochs of the windows are."""
        epochs = EPOCHS if self.epochs is None else self.epochs
        return self.steps or max(1, round(epochs * windows / self.batch))


def check(config: SquadConfig) -> None:
    """Refuses values that are out of range, contradict each other, or are missing."""
    if config.predict and not config.resume:
        if config.train or config.dev:
            raise InputError(
                "--predict answers without training; drop it, or --train and --dev."
            )
        if config.start is None:
            raise InputError(
                "--predict answers with weights that have learnt to; give --start, or "
                "--resume for those of the run in --out."
            )
    elif config.train is None:
        raise InputError(
            "there is nothing to learn from; give --train FILE, or --predict FILE to "
            "answer alone."
        )
    check_flags(config)
    if config.steps and config.epochs:
        raise InputError("--steps and --epochs say the same; drop either.")
    if config.start and config.model:
        raise InputError("--model is of random weights; drop it or --start.")
    if config.start is None and config.vocab is None:
        raise InputError(
            "a BERT that starts with random weights has no word pieces; give --vocab, "
            "or --start."
        )
