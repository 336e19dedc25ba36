"""From text to batches: what a run reads, and keeps in its folder to read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from train.bert.masked_pairs import continues_word, examples
from train.core.batches import batches
from train.core.output import say
from train.core.run_folder import check_contents, contents_name
from train.data.corpus import check_outside, read_corpus, survey
from train.data.tokenized import (
    MAX_SENTENCE,
    held_out_documents,
    read_tokens,
    sentences_of,
    tokens_folder,
    write_tokens,
)
from train.data.vocabulary import (
    UNK,
    read_vocabulary,
    say_if_unknown,
    special_pieces,
    tokenizer_of,
    train_vocabulary,
)

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import grain

    from models import PreTrainingBatch
    from train.bert.config import LengthPlan, PretrainConfig
    from train.core.run_folder import Run
    from train.data.tokenized import TokenizedCorpus
    from train.data.vocabulary import Vocabulary

VOCABULARY_FILE = "vocab.txt"
VOCAB_SIZE = 4096
"""Word pieces of a vocabulary trained on the corpus, where no number is given."""

_RESTORE = {
    "corpus": "restore its files (or the Python that it was started with)",
    "vocabulary": f"restore its {VOCABULARY_FILE}",
}


class Phase(NamedTuple):
    """The batches of a phase.

    Attributes:
      training: Element t is this process's part of the batch of step t.
      held_out: Likewise, of text that is not trained on, in micro-batches.
    """

    training: grain.MapDataset[PreTrainingBatch]
    held_out: grain.MapDataset[PreTrainingBatch]


@dataclass(frozen=True)
class Data:
    """The data to train and to evaluate on.

    Attributes:
      vocabulary: The word pieces.
      about: The corpus's sizes, in words.
      phases: The batches of each phase.
    """

    vocabulary: Vocabulary
    about: str
    phases: list[Phase]


def load(
    config: PretrainConfig, run: Run[PretrainConfig] | None = None
) -> tuple[dict[str, str], Data]:
    """Reads the corpus and the vocabulary, training one where none is given.

    The corpus is read as a stream, a few times, and cut into word pieces once, in files
    that are named by all that decides them. A run that goes on must have the corpus
    that it had, and keeps the vocabulary in its folder.

    Returns:
      The names of corpus and vocabulary by their contents, and the data.

    Raises:
      InputError: The corpus or the vocabulary cannot be used or has changed, or there
        is no room for its word pieces.
    """
    folder = config.out
    check_outside(config.corpus, out=folder, tokens=config.tokens)
    about = survey(read_corpus(config.corpus))
    held_out = held_out_documents(about, config.seed)
    vocabulary = _vocabulary(config, folder, held_out, goes_on=run is not None)
    contents = {"corpus": about.fingerprint, "vocabulary": contents_name(*vocabulary)}
    if run:
        check_contents(run, contents, _RESTORE)

    def fill(new: Path) -> None:
        documents, unknown = read_corpus(config.corpus), vocabulary.index(UNK)
        encode = sentences_of(tokenizer_of(vocabulary))
        share = write_tokens(new, documents, held_out, encode, unknown)
        say_if_unknown(share, "give a --vocab of such texts, or none to train one")

    deciding = (*contents.values(), str(config.seed), str(MAX_SENTENCE))
    training, evaluation = read_tokens(tokens_folder(config, folder, fill, *deciding))
    pieces = special_pieces(vocabulary)
    inside = continues_word(vocabulary) if config.whole_words else None

    def batched(
        text: TokenizedCorpus, plan: LengthPlan, batch: int
    ) -> grain.MapDataset[PreTrainingBatch]:
        ordered = examples(text, pieces, plan.seq, config.seed, inside)
        return batches(ordered, batch)

    phases = [
        Phase(
            batched(training, plan, plan.batch),
            # As much at once as training does.
            batched(evaluation, plan, plan.batch // plan.accumulate),
        )
        for plan in config.phases
    ]
    return contents, Data(vocabulary, _sizes(training, evaluation), phases)


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
