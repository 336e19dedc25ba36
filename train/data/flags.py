"""The flags of every task that reads a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from train.core.flags import Changeable, Count


@dataclass(frozen=True, kw_only=True)
class CorpusFlags:
    """Flags of every task that trains on text without labels."""

    corpus: Changeable[tuple[Path, ...]] = ()  # its contents are compared elsewhere
    """Text files, or folders of them; default: the reference documentation of the
    running Python, two megabytes of English."""
    tokens: Changeable[Path | None] = None
    """Folder that keeps the corpus as tokens, for any number of runs; default: one in
    --out."""
    eval_sequences: Count = 512
    """Held-out sequences of an evaluation, to the next whole batch."""
