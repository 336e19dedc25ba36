"""The flags of `python -m train.lm`, and which of their values make sense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from models import DECODER_SIZES
from models.decoder import DecoderSize
from train.core.flags import (
    Changeable,
    Count,
    FromScratchFlags,
    Positive,
    Range,
    Seed,
    TransformerFlags,
    check_from_scratch,
)
from train.data.flags import CorpusFlags


@dataclass(frozen=True, kw_only=True)
class LmConfig(TransformerFlags, CorpusFlags, FromScratchFlags):
    """Trains a causal language model, by workers that exchange one bit a parameter."""

    tokenizer: Path | None = None
    """A tokenizer.json of Hugging Face's tokenizers; default: a token is a byte."""
    model: DecoderSize = "nano"
    """Size of the decoder."""
    tied: bool = True
    """Let the head be the embedding of tokens, instead of weights of its own."""
    steps: Changeable[Count] = 1000
    """Training steps."""
    batch: Count = 16
    """Sequences a step, of all workers together."""
    seq: Count = 64
    """Tokens a sequence."""
    dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    """Share of the activations dropped while training."""
    seed: Seed = 0
    """Decides the parameters, the held-out text, the order of the rest, the dropout."""
    learning_rate: Positive = 3e-3
    """Peak of the learning rate; it falls to a tenth at the end."""
    eval_every: Changeable[Count] = 100
    """Steps between evaluations on held-out text; there is one at the end."""
    compare: bool = False
    """Train plain Adam, and local steps of Muon that exchange one bit a value every
    eighth, as well, on the same samples, and draw them beside."""
    out: Changeable[Path] = Path("runs/lm")
    """Folder for checkpoints, metrics, tokens and picture."""

    @property
    def compared(self) -> Mapping[str, Mapping[str, Any]]:
        """The optimizers that --compare trains beside, each with flags of its own."""
        return {**super().compared, "local": {"inner": "muon"}}

    @property
    def model_options(self) -> dict[str, Any]:
        """Options of a model beside its size and its vocabulary."""
        return {**super().model_options, "tied": self.tied}


def check(config: LmConfig) -> None:
    """Refuses values that are out of their range, or contradict each other."""
    check_from_scratch(config)
    config.model_of(DECODER_SIZES[config.model])
