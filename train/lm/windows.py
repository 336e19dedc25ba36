"""Text as tokens in files, windows over it, and batches of them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from train.data.array_files import growing_array, mapped_array
from train.data.tokenized import EVALUATION, TRAINING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from pathlib import Path

    import grain
    from jaxtyping import Int

    from train.data.corpus import Document
    from train.lm.coding import Coding

FILE = "tokens.npy"


@dataclass(frozen=True)
class Windows:
    """A text in stretches of one length, each with the token after it.

    Every token but the first is to be predicted in one window, and in one alone.

    Attributes:
      tokens: The text, end to end.
      length: Tokens of a stretch, T.
    """

    tokens: Int[np.ndarray, " tokens"]
    length: int

    def __len__(self) -> int:
        """Whole windows."""
        return max(0, len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> Int[np.ndarray, " T+1"]:
        """A window."""
        first = index * self.length
        return self.tokens[first : first + self.length + 1].astype(np.int32)


@dataclass(frozen=True)
class Data:
    """The text to train and to evaluate on.

    Attributes:
      coding: Its tokens.
      training: Element t is this process's part of the windows of step t.
      held_out: Likewise, of text that is not trained on, in micro-batches.
      evaluated: Held-out windows of an evaluation.
    """

    coding: Coding
    training: grain.MapDataset[Int[np.ndarray, "B T+1"]]
    held_out: grain.MapDataset[Int[np.ndarray, "B T+1"]]
    evaluated: int


def write_tokens(
    folder: Path,
    documents: Iterable[Document],
    held_out: Container[int],
    coding: Coding,
) -> float:
    """Cuts documents into tokens, one at a time, each followed by the token of its end.

    Args:
      folder: Takes a file of training text, and one of held-out text.
      documents: All documents.
      held_out: The numbers of those that are not trained on.
      coding: The tokens.

    Returns:
      The part of the text's tokens that are unknown ones.
    """
    unknown = total = 0
    dtype = np.min_scalar_type(coding.vocab_size - 1)
    with contextlib.ExitStack() as stack:
        appends = []
        for part in TRAINING, EVALUATION:
            (folder / part).mkdir()
            file = growing_array(folder / part / FILE, dtype)
            appends.append(stack.enter_context(file))
        for number, document in enumerate(documents):
            append = appends[number in held_out]
            tokens = coding.encode(" ".join(document))
            unknown += np.count_nonzero(tokens == coding.unknown)
            total += len(tokens)
            append(tokens)
            append(coding.end)
    return unknown / max(1, total)


def read_windows(folder: Path, part: str, length: int) -> Windows:
    """Windows of which memory holds what is looked at.

    Args:
      folder: As `write_tokens` has filled it.
      part: `TRAINING` or `EVALUATION` of `train.data.tokenized`.
      length: Tokens of a window.

    Returns:
      The windows.
    """
    return Windows(mapped_array(folder / part / FILE), length)
