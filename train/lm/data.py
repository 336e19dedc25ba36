"""From text to windows over its tokens: what a run reads, and keeps to read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from train.core.batches import batches, endless
from train.core.errors import InputError
from train.core.run_folder import check_contents, contents_name
from train.core.text_file import replace_text
from train.data.corpus import check_outside, read_corpus, survey
from train.data.tokenized import (
    held_out_documents,
    read_tokens,
    tokens_folder,
    write_tokens,
)
from train.data.vocabulary import say_if_unknown

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import grain
    from jaxtyping import Int

    from train.core.run_folder import Run
    from train.data.corpus import Document
    from train.lm.config import LmConfig

TOKENIZER_FILE = "tokenizer.json"

_RESTORE = {
    "corpus": "restore its files (or the Python that it was started with)",
    "tokenizer": f"restore its {TOKENIZER_FILE}",
}


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


# A corpus with a byte of zero is binary, and is refused.
BYTES = Coding(lambda text: np.frombuffer(text.encode(), np.uint8), 0, vocab_size=256)
"""A token is a byte of UTF-8; zero ends a document."""


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


def load(
    config: LmConfig, run: Run[LmConfig] | None = None
) -> tuple[dict[str, str], Data]:
    """Reads the corpus, and cuts it into tokens once, in files.

    A run that goes on must have the corpus that it had, and keeps the tokenizer in its
    folder.

    Returns:
      The names of corpus and tokenizer by their contents, and the text.

    Raises:
      InputError: The corpus or the tokenizer cannot be used or has changed, or there
        is too little text, or no room for its tokens.
    """
    check_outside(config.corpus, out=config.out, tokens=config.tokens)
    about = survey(read_corpus(config.corpus))
    held_out = held_out_documents(about, config.seed)
    coding = BYTES
    if config.tokenizer:
        kept = config.out / TOKENIZER_FILE
        # What else is there was left by a run that was killed before it began.
        coding = read_coding(kept if run and kept.exists() else config.tokenizer)
    contents = {"corpus": about.fingerprint, "tokenizer": contents_name(coding.file)}
    if run:
        check_contents(run, contents, _RESTORE)

    def encode(document: Document) -> list[Int[np.ndarray, " tokens"]]:
        return [coding.encode(" ".join(document)), np.array([coding.end])]

    def fill(new: Path) -> None:
        documents = read_corpus(config.corpus)
        dtype = np.min_scalar_type(coding.vocab_size - 1)
        share = write_tokens(new, documents, held_out, encode, coding.unknown, dtype)
        say_if_unknown(share, "give a --tokenizer of such texts, or none for bytes")

    # The last word keeps them apart from what other tasks make of the same text.
    deciding = (*contents.values(), str(config.seed), "end to end")
    texts = read_tokens(tokens_folder(config, config.out, fill, *deciding))
    training, evaluation = (Windows(text.pieces, config.seq) for text in texts)
    for part, windows, least in (
        ("training", training, config.batch),
        ("held-out", evaluation, 1),
    ):
        if len(windows) < least:
            raise InputError(
                f"the corpus's {part} text makes {len(windows)} sequences of "
                f"{config.seq} tokens, and {least} at least are needed; give more "
                "text, or a smaller --seq or --batch."
            )
    return contents, Data(
        coding,
        batches(endless(training, config.seed), config.batch),
        # As much at once as training does.
        batches(endless(evaluation, config.seed), config.batch // config.accumulate),
        min(config.eval_sequences, len(evaluation)),
    )


def read_coding(path: Path) -> Coding:
    """Reads a tokenizer.json of Hugging Face's `tokenizers`.

    A token more ends a document. No special tokens are added, and nothing is cut off or
    padded, whatever the file says.

    Raises:
      InputError: It cannot be read, or is no such file.
    """
    try:
        file = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(file)
    except Exception as error:  # it raises nothing more particular
        raise InputError(
            f"the tokenizer {path} cannot be read as one of Hugging Face's tokenizers "
            f"({error}); give the path of a tokenizer.json."
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


def keep_tokenizer(coding: Coding, folder: Path, *, goes_on: bool) -> None:
    """Writes the tokenizer into a run's folder, unless it goes on and has it."""
    file = folder / TOKENIZER_FILE
    if coding.file and not (goes_on and file.exists()):
        replace_text(file, coding.file)
