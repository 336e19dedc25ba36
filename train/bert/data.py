"""From text to batches: what a run reads, and keeps in its folder to read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.bert.examples import continues_word, examples
from train.bert.masked_pairs import read_spans, write_spans
from train.core.batches import batches
from train.core.errors import InputError, writable
from train.core.output import say
from train.core.run_folder import check_contents, contents_name
from train.data.array_files import make_folder
from train.data.corpus import check_outside, read_corpus, survey
from train.data.pieces import special_pieces
from train.data.tokenized import (
    EVALUATION,
    MAX_SENTENCE,
    TRAINING,
    held_out_documents,
    read_tokens,
    write_tokens,
)
from train.data.vocabulary import (
    read_vocabulary,
    say_if_unknown,
    tokenizer_of,
    train_vocabulary,
    write_vocabulary,
)

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import grain

    from models import PreTrainingBatch
    from train.bert.config import PretrainConfig
    from train.bert.masked_pairs import Spans
    from train.bert.phases import LengthPlan
    from train.core.run_folder import Run
    from train.data.tokenized import TokenizedCorpus
    from train.data.vocabulary import Vocabulary

VOCABULARY_FILE = "vocab.txt"
VOCAB_SIZE = 4096
"""Word pieces of a vocabulary trained on the corpus, where no number is given."""
TOKENS_FOLDER = "tokens"
UNKNOWN_FILE = "unknown.txt"
"""Beside the word pieces, the share of them that are [UNK]."""

_RESTORE = {
    "corpus": "restore its files (or the Python that it was started with)",
    "vocabulary": f"restore its {VOCABULARY_FILE}",
}


@dataclass(frozen=True)
class Data:
    """The data of a phase, to train and to evaluate on.

    Attributes:
      vocabulary: The word pieces.
      contents: The names of the corpus and of the vocabulary by their contents.
      about: The corpus's sizes, in words.
      training: Element t is this process's part of the batch of step t.
      held_out: Likewise, of text that is not trained on, in micro-batches.
    """

    vocabulary: Vocabulary
    contents: dict[str, str]
    about: str
    training: grain.MapDataset[PreTrainingBatch]
    held_out: grain.MapDataset[PreTrainingBatch]


def load(config: PretrainConfig, folder: Path) -> Data:
    """The data of the first phase, by `load_phases`."""
    return load_phases(config, folder)[0]


def load_phases(
    config: PretrainConfig, folder: Path, run: Run[PretrainConfig] | None = None
) -> list[Data]:
    """Reads the corpus and the vocabulary, training one where none is given.

    The corpus is read as a stream, a few times, and cut into word pieces once, in files
    that are named by all that decides them.

    Args:
      config: The flags.
      folder: The run's folder.
      run: The run that goes on, whose corpus it must be; it goes on with the
        vocabulary in its folder.

    Returns:
      The data of each phase.

    Raises:
      InputError: The corpus or the vocabulary cannot be used or has changed, or there
        is no room for its word pieces.
    """
    check_outside(config.corpus, out=folder, tokens=config.tokens)
    about = survey(read_corpus(config.corpus))
    held_out = held_out_documents(about, config.seed)
    vocabulary = _vocabulary(config, folder, held_out, goes_on=run is not None)
    contents = {"corpus": about.fingerprint, "vocabulary": contents_name(*vocabulary)}
    if run:
        check_contents(run, contents, _RESTORE)

    where = (config.tokens, "--tokens") if config.tokens else (folder, "--out")
    with writable(*where):
        tokens = _tokens(config, folder, contents, vocabulary, held_out)
    training, evaluation = read_tokens(tokens)
    pieces = special_pieces(vocabulary)
    inside = continues_word(vocabulary) if config.whole_words else None

    def batched(
        part: str, text: TokenizedCorpus, plan: LengthPlan, batch: int
    ) -> grain.MapDataset[PreTrainingBatch]:
        with writable(*where):
            spans = _packed(tokens, part, text, plan.seq)
        ordered = examples(text, pieces, plan.seq, config.seed, inside, spans)
        return batches(ordered, batch)

    return [
        Data(
            vocabulary,
            contents,
            _sizes(training, evaluation),
            batched(TRAINING, training, plan, plan.batch),
            # As much at once as training does.
            batched(EVALUATION, evaluation, plan, plan.batch // plan.accumulate),
        )
        for plan in config.phases
    ]


def _sizes(training: TokenizedCorpus, held_out: TokenizedCorpus) -> str:
    documents = training.num_documents + held_out.num_documents
    tokens = len(training.pieces) + len(held_out.pieces)
    return (
        f"{documents:,} documents of {tokens:,} tokens, {held_out.num_documents:,} of "
        "them held out"
    )


def _vocabulary(
    config: PretrainConfig, folder: Path, held_out: Collection[int], *, goes_on: bool
) -> Vocabulary:
    """The vocabulary of a run that goes on, or else the given, or else a new one."""
    kept = folder / VOCABULARY_FILE
    # What else is there was left by a run that was killed before it began.
    if goes_on and kept.exists():
        return read_vocabulary(kept)
    if config.vocab:
        return read_vocabulary(config.vocab)
    documents = enumerate(read_corpus(config.corpus))
    trained_on = (document for i, document in documents if i not in held_out)
    vocabulary = train_vocabulary(trained_on, config.vocab_size or VOCAB_SIZE)
    if config.vocab_size and len(vocabulary) < config.vocab_size:
        say(
            f"the corpus makes {len(vocabulary):,} word pieces, fewer than "
            f"--vocab-size {config.vocab_size:,}"
        )
    return vocabulary


def _tokens(
    config: PretrainConfig,
    folder: Path,
    contents: dict[str, str],
    vocabulary: Vocabulary,
    held_out: Collection[int],
) -> Path:
    """The folder of the corpus as word pieces, made where it is not there."""
    deciding = (*contents.values(), str(config.seed), str(MAX_SENTENCE))
    tokens = config.tokens or folder / TOKENS_FOLDER
    tokens /= contents_name(*deciding)[:16]

    def fill(new: Path) -> None:
        documents = read_corpus(config.corpus)
        share = write_tokens(new, documents, held_out, tokenizer_of(vocabulary))
        (new / UNKNOWN_FILE).write_text(repr(share), encoding="utf-8")

    make_folder(tokens, fill)
    unknown = tokens / UNKNOWN_FILE
    if unknown.exists():  # earlier versions have not written it
        try:
            share = float(unknown.read_text(encoding="utf-8"))
        except ValueError as error:  # as after a loss of power
            raise InputError(f"{tokens} is damaged; delete that folder.") from error
        say_if_unknown(share, "give a --vocab of such texts, or none to train one")
    return tokens


def _packed(tokens: Path, part: str, text: TokenizedCorpus, length: int) -> Spans:
    """The spans of a part of the corpus, packed once for each length."""
    folder = tokens / f"{part}-{length}"
    make_folder(folder, lambda new: write_spans(new, text, length))
    spans = read_spans(folder)
    if text.num_documents < 2 or not len(spans):
        raise InputError(
            f"fewer than two of the corpus's {part.replace('_', ' ')} documents have "
            "two word pieces together; give more text."
        )
    return spans


def keep_vocabulary(vocabulary: Vocabulary, folder: Path) -> None:
    """Writes the vocabulary into the run's folder."""
    write_vocabulary(folder / VOCABULARY_FILE, vocabulary)
