"""Text as tokens: bytes, or those of a `tokenizers` file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from train.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jaxtyping import Int


@dataclass(frozen=True)
class Coding:
    """A way to write text as tokens.

    Attributes:
      encode: From text to its tokens.
      end: The token that ends a document, which is in no text.
      vocab_size: Tokens that there are, `end` among them.
      file: The tokenizer, as its JSON; empty for bytes.
      unknown: The token of what has none of its own; None where all has.
    """

    encode: Callable[[str], Int[np.ndarray, " tokens"]]
    end: int
    vocab_size: int
    file: str = ""
    unknown: int | None = None


def _bytes(text: str) -> Int[np.ndarray, " tokens"]:
    return np.frombuffer(text.encode(), np.uint8)


# A corpus with a byte of zero is binary, and is refused.
BYTES = Coding(_bytes, end=0, vocab_size=256)
"""A token is a byte of UTF-8; zero ends a document."""


def read_coding(path: Path) -> Coding:
    """Reads a file of Hugging Face's `tokenizers`.

    Args:
      path: A tokenizer.json.

    Returns:
      Its tokens, and one more that ends a document; no special tokens are added, and
      nothing is cut off or padded, whatever the file says.

    Raises:
      InputError: It cannot be read, or is no such file.
    """
    try:
        file = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the tokenizer {path} cannot be read ({error}); give the path of a "
            "tokenizer.json."
        ) from error
    try:
        tokenizer = Tokenizer.from_str(file)
    except Exception as error:  # it raises nothing more particular
        raise InputError(
            f"the tokenizer {path} is not of Hugging Face's tokenizers ({error}); give "
            "a tokenizer.json."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> Int[np.ndarray, " tokens"]:
        return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids)

    # Ids may leave gaps, so that their number is not enough.
    end = max(tokenizer.get_vocab().values()) + 1
    unknown = getattr(tokenizer.model, "unk_token", None)
    return Coding(
        encode, end, end + 1, file, unknown and tokenizer.token_to_id(unknown)
    )
