"""The ids of a vocabulary's special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.data.vocabulary import CLS, MASK, PAD, SEP

if TYPE_CHECKING:
    from train.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class Pieces:
    """The ids that building sequences needs."""

    vocab_size: int
    pad: int
    cls: int
    sep: int
    mask: int


def special_pieces(vocabulary: Vocabulary) -> Pieces:
    """The ids of the special tokens of a vocabulary."""
    pad, cls, sep, mask = (vocabulary.index(token) for token in (PAD, CLS, SEP, MASK))
    return Pieces(len(vocabulary), pad=pad, cls=cls, sep=sep, mask=mask)
