"""From text to batches: what a run reads, and keeps in its folder to read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from train.corpus import fingerprint, read_corpus
from train.errors import InputError
from train.examples import batches, examples, special_pieces
from train.tokenized import split_held_out, tokenize
from train.vocabulary import (
    read_vocabulary,
    tokenizer_of,
    train_vocabulary,
    write_vocabulary,
)

if TYPE_CHECKING:
    from pathlib import Path

    import grain

    from models import PreTrainingBatch
    from train.config import PretrainConfig
    from train.phases import Phase
    from train.tokenized import TokenizedCorpus
    from train.vocabulary import Vocabulary

VOCABULARY_FILE = "vocab.txt"


@dataclass(frozen=True)
class Data:
    """What a phase of a run trains and evaluates on.

    Attributes:
      vocabulary: The word pieces.
      corpus: Name of the text by its contents.
      training: Element t is this process's part of the batch of step t.
      held_out: Likewise, of text that is not trained on, in micro-batches.
    """

    vocabulary: Vocabulary
    corpus: str
    training: grain.MapDataset[PreTrainingBatch]
    held_out: grain.MapDataset[PreTrainingBatch]


def load(config: PretrainConfig, folder: Path, corpus: str | None = None) -> Data:
    """What the first phase trains on; `load_phases` of it alone."""
    return load_phases(config, folder, corpus)[0]


def load_phases(
    config: PretrainConfig, folder: Path, corpus: str | None = None
) -> list[Data]:
    """Reads the corpus and the vocabulary, training one where none is given.

    Args:
      config: The flags.
      folder: The run's folder.
      corpus: The name that the corpus must have, for a run that goes on; it goes on
        with the vocabulary in its folder.

    Returns:
      The data of each phase.

    Raises:
      InputError: The corpus or the vocabulary cannot be used, or the corpus has
        changed.
    """
    documents = read_corpus(config.corpus)
    name = fingerprint(documents)
    if corpus not in (None, name):
        raise InputError(
            f"the corpus is not the one that the run in {folder} was started with; "
            "restore its files (or the Python that it was started with), or start a "
            "new run in another --out."
        )
    training, held_out = split_held_out(documents, config.seed)
    kept = folder / VOCABULARY_FILE
    # What else is there was left by a run that was killed before it began.
    if corpus is not None and kept.exists():
        vocabulary = read_vocabulary(kept)
    elif config.vocab:
        vocabulary = read_vocabulary(config.vocab)
    else:
        vocabulary = train_vocabulary(training, config.vocab_size)
    tokenizer = tokenizer_of(vocabulary)
    training, held_out = (tokenize(part, tokenizer) for part in (training, held_out))
    pieces = special_pieces(vocabulary)

    def batched(
        part: TokenizedCorpus, phase: Phase, batch: int
    ) -> grain.MapDataset[PreTrainingBatch]:
        return batches(
            examples(part, pieces, phase.seq, config.seed),
            batch,
            process=jax.process_index(),
            num_processes=jax.process_count(),
        )

    return [
        Data(
            vocabulary,
            name,
            batched(training, phase, phase.batch),
            # As much at once as training does.
            batched(held_out, phase, phase.batch // phase.accumulate),
        )
        for phase in config.phases
    ]


def keep_vocabulary(vocabulary: Vocabulary, folder: Path) -> None:
    """Writes the vocabulary into the run's folder."""
    write_vocabulary(folder / VOCABULARY_FILE, vocabulary)
