"""From text to batches: what a run reads, and keeps in its folder to read again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from train.bert.examples import batches, continues_word, examples, special_pieces
from train.bert.pairs import read_spans, write_spans
from train.core.command import say_if_unknown
from train.core.errors import InputError, writable
from train.data.array_files import make_folder
from train.data.corpus import read_corpus, survey
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
    tokenizer_of,
    train_vocabulary,
    write_vocabulary,
)

if TYPE_CHECKING:
    from pathlib import Path

    import grain

    from models import PreTrainingBatch
    from train.bert.config import PretrainConfig
    from train.bert.phases import Phase
    from train.core.run_folder import Run
    from train.data.tokenized import TokenizedCorpus
    from train.data.vocabulary import Vocabulary

VOCABULARY_FILE = "vocab.txt"
VOCAB_SIZE = 4096
"""Word pieces of a vocabulary trained on the corpus, where no number is given."""
TOKENS_FOLDER = "tokens"


@dataclass(frozen=True)
class Data:
    """What a phase of a run trains and evaluates on.

    Attributes:
      vocabulary: The word pieces.
      corpus: Name of the text by its contents.
      vocabulary_name: Name of the word pieces, likewise.
      training: Element t is this process's part of the batch of step t.
      held_out: Likewise, of text that is not trained on, in micro-batches.
    """

    vocabulary: Vocabulary
    corpus: str
    vocabulary_name: str
    training: grain.MapDataset[PreTrainingBatch]
    held_out: grain.MapDataset[PreTrainingBatch]


def load(config: PretrainConfig, folder: Path) -> Data:
    """What the first phase trains on; `load_phases` of it alone."""
    return load_phases(config, folder)[0]


def load_phases(
    config: PretrainConfig, folder: Path, run: Run | None = None
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
    about = survey(read_corpus(config.corpus))
    name = about.fingerprint
    if run and run.corpus != name:
        raise InputError(
            f"the corpus is not the one that the run in {folder} was started with; "
            "restore its files (or the Python that it was started with), or start a "
            "new run in another --out."
        )
    held_out = held_out_documents(about, config.seed)
    kept = folder / VOCABULARY_FILE
    # What else is there was left by a run that was killed before it began.
    if run and kept.exists():
        vocabulary = read_vocabulary(kept)
    elif config.vocab:
        vocabulary = read_vocabulary(config.vocab)
    else:
        documents = enumerate(read_corpus(config.corpus))
        trained_on = (document for i, document in documents if i not in held_out)
        vocabulary = train_vocabulary(trained_on, config.vocab_size or VOCAB_SIZE)
    vocabulary_name = hashlib.sha256("\n".join(vocabulary).encode()).hexdigest()
    if run and run.vocabulary != vocabulary_name:
        raise InputError(
            f"the vocabulary is not the one that the run in {folder} was started with; "
            f"restore its {VOCABULARY_FILE}, or start a new run in another --out."
        )

    def fill(new: Path) -> None:
        documents = read_corpus(config.corpus)
        share = write_tokens(new, documents, held_out, tokenizer_of(vocabulary))
        say_if_unknown(share)

    deciding = json.dumps([name, vocabulary, config.seed, MAX_SENTENCE])
    key = hashlib.sha256(deciding.encode()).hexdigest()[:16]
    tokens = (config.tokens or folder / TOKENS_FOLDER) / key
    where = (config.tokens, "--tokens") if config.tokens else (folder, "--out")
    with writable(*where):
        make_folder(tokens, fill)
    training, evaluation = read_tokens(tokens)
    pieces = special_pieces(vocabulary)
    inside = continues_word(vocabulary) if config.whole_words else None

    def batched(
        part: str, text: TokenizedCorpus, phase: Phase, batch: int
    ) -> grain.MapDataset[PreTrainingBatch]:
        packed = tokens / f"{part}-{phase.seq}"
        with writable(*where):
            make_folder(packed, lambda new: write_spans(new, text, phase.seq))
        spans = read_spans(packed)
        if text.num_documents < 2 or not len(spans):
            raise InputError(
                f"fewer than two of the corpus's {part.replace('_', ' ')} documents "
                "have two word pieces together; give more text."
            )
        return batches(
            examples(text, pieces, phase.seq, config.seed, inside, spans),
            batch,
            process=jax.process_index(),
            num_processes=jax.process_count(),
        )

    return [
        Data(
            vocabulary,
            name,
            vocabulary_name,
            batched(TRAINING, training, phase, phase.batch),
            # As much at once as training does.
            batched(EVALUATION, evaluation, phase, phase.batch // phase.accumulate),
        )
        for phase in config.phases
    ]


def keep_vocabulary(vocabulary: Vocabulary, folder: Path) -> None:
    """Writes the vocabulary into the run's folder."""
    write_vocabulary(folder / VOCABULARY_FILE, vocabulary)
