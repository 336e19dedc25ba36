"""From text to windows over its tokens: what a run reads, and keeps to read again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.core.batches import batches, endless
from train.core.errors import InputError
from train.core.run_folder import check_contents, contents_name
from train.core.text_file import replace_text
from train.data.corpus import check_outside, read_corpus, survey
from train.data.tokenized import (
    EVALUATION,
    TRAINING,
    held_out_documents,
    tokens_folder,
)
from train.data.vocabulary import say_if_unknown
from train.lm.coding import BYTES, read_coding
from train.lm.windows import FILE, Data, read_windows, write_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from train.core.run_folder import Run
    from train.lm.coding import Coding
    from train.lm.config import LmConfig
    from train.lm.windows import Windows

TOKENIZER_FILE = "tokenizer.json"

_RESTORE = {
    "corpus": "restore its files (or the Python that it was started with)",
    "tokenizer": f"restore its {TOKENIZER_FILE}",
}


def load(
    config: LmConfig, run: Run[LmConfig] | None = None
) -> tuple[dict[str, str], Data]:
    """Reads the corpus, and cuts it into tokens once, in files.

    Args:
      config: The flags.
      run: The run that goes on, whose corpus it must be; it goes on with the tokenizer
        in its folder.

    Returns:
      The names of corpus and tokenizer by their contents, and the text.

    Raises:
      InputError: The corpus or the tokenizer cannot be used or has changed, or there
        is too little text, or no room for its tokens.
    """
    check_outside(config.corpus, out=config.out, tokens=config.tokens)
    about = survey(read_corpus(config.corpus))
    held_out = held_out_documents(about, config.seed)
    coding = _coding(config, goes_on=run is not None)
    contents = {"corpus": about.fingerprint, "tokenizer": contents_name(coding.file)}
    if run:
        check_contents(run, contents, _RESTORE)

    def fill(new: Path) -> None:
        share = write_tokens(new, read_corpus(config.corpus), held_out, coding)
        say_if_unknown(share, "give a --tokenizer of such texts, or none for bytes")

    # The file's name keeps them apart from what other tasks make of the same text.
    deciding = (*contents.values(), str(config.seed), FILE)
    tokens = tokens_folder(config, config.out, fill, *deciding)
    training = _windows(tokens, TRAINING, config.seq, config.batch)
    evaluation = _windows(tokens, EVALUATION, config.seq, 1)
    return contents, Data(
        coding,
        batches(endless(training, config.seed), config.batch),
        # As much at once as training does.
        batches(endless(evaluation, config.seed), config.batch // config.accumulate),
        min(config.eval_sequences, len(evaluation)),
    )


def _coding(config: LmConfig, *, goes_on: bool) -> Coding:
    """The tokenizer of a run that goes on, or else the given one, or else bytes."""
    if config.tokenizer is None:
        return BYTES
    kept = config.out / TOKENIZER_FILE
    # What else is there was left by a run that was killed before it began.
    return read_coding(kept if goes_on and kept.exists() else config.tokenizer)


def _windows(folder: Path, part: str, length: int, least: int) -> Windows:
    windows = read_windows(folder, part, length)
    if len(windows) < least:
        raise InputError(
            f"the corpus's {part.replace('_', '-')} text makes {len(windows)} "
            f"sequences of {length} tokens, and {least} at least are needed; give more "
            "text, or a smaller --seq or --batch."
        )
    return windows


def keep_tokenizer(coding: Coding, folder: Path, *, goes_on: bool) -> None:
    """Writes the tokenizer into a run's folder, unless it goes on and has it."""
    file = folder / TOKENIZER_FILE
    if coding.file and not (goes_on and file.exists()):
        replace_text(file, coding.file)
