"""What fine-tuning starts from: an encoder's weights and their vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from models import SIZES, BertConfig, WeightsError, huggingface
from train import checkpoint, run_folder
from train.data import VOCABULARY_FILE
from train.errors import InputError
from train.objective import abstract_params
from train.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    from train.config import Size
    from train.vocabulary import Vocabulary


class Start(NamedTuple):
    """Where fine-tuning starts.

    Attributes:
      config: The model's sizes.
      vocabulary: Its word pieces.
      encoder: The encoder's parameters; None for random ones.
    """

    config: BertConfig
    vocabulary: Vocabulary
    encoder: dict[str, Any] | None


def read_start(folder: Path | None, vocab: Path | None, model: Size) -> Start:
    """Reads weights and vocabulary.

    Args:
      folder: A folder in Hugging Face's layout, or of a run of `train.pretrain`; None
        for random weights.
      vocab: The vocabulary; None for the one in the folder.
      model: The size where weights are random.

    Returns:
      The start.

    Raises:
      InputError: The folder holds neither, or a file in it cannot be used, or the
        vocabulary is not of the weights' size.
    """
    if vocab is None:
        if folder is None:
            raise InputError("there is no vocabulary; give --vocab, or --start.")
        vocab = folder / VOCABULARY_FILE
    vocabulary = read_vocabulary(vocab)
    if folder is None:
        return Start(
            replace(SIZES[model], vocab_size=len(vocabulary)), vocabulary, None
        )
    if (folder / huggingface.WEIGHTS).exists():
        try:
            config, encoder = huggingface.read_encoder(folder)
        except WeightsError as error:
            raise InputError(str(error)) from error
    elif (folder / checkpoint.FOLDER).exists():
        config, encoder = _read_run(folder)
    else:
        raise InputError(
            f"{folder} holds no weights; give a folder with {huggingface.CONFIG} and "
            f"{huggingface.WEIGHTS}, or a run of train.pretrain."
        )
    if len(vocabulary) != config.vocab_size:
        raise InputError(
            f"the vocabulary {vocab} has {len(vocabulary):,} word pieces and the "
            f"weights in {folder} have {config.vocab_size:,}; give --vocab theirs."
        )
    return Start(config, vocabulary, encoder)


def _read_run(folder: Path) -> tuple[BertConfig, dict[str, Any]]:
    """The encoder of a pre-training run's newest checkpoint."""
    flags = run_folder.read(folder).config
    step = checkpoint.latest_step(folder)
    arrays = folder.resolve() / checkpoint.FOLDER / str(step) / "arrays"
    try:
        stored = checkpoint.stored_model(folder, step)
        config = replace(
            SIZES[flags.model],
            vocab_size=stored["vocab_size"],
            pre_norm=stored["pre_norm"],
        )
        abstract = abstract_params(config)
        # NumPy arrays, whatever devices they were saved on; the optimizer's state is
        # left.
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), abstract)
        with ocp.PyTreeCheckpointer() as checkpointer:
            restored = checkpointer.restore(
                arrays,
                args=ocp.args.PyTreeRestore(
                    item={"params": abstract},
                    restore_args={"params": how},
                    partial_restore=True,
                ),
            )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"the checkpoint {arrays.parent} cannot be read ({error}); give another "
            "run as --start."
        ) from error
    bert = restored["params"]["bert"]
    bert.pop("pooler")
    return config, bert
