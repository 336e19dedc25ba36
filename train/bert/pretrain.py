"""`python -m train.pretrain`: pre-trains a BERT with 1-bit Adam.

`--help` lists the flags. A run leaves in its folder `config.json` (what was asked
for), `vocab.txt`, `checkpoints`, `metrics.jsonl`, `training.png` and in `model` the
weights in Hugging Face's layout; with `--compare` plain Adam's own are in the folder
`adam` inside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from train.bert.config import PRESETS, PretrainConfig, check, without_second_phase
from train.bert.data import VOCABULARY_FILE, load
from train.bert.task import make_task
from train.core.commands import (
    Command,
    parse_flags,
    read_flags,
    run_command,
    train_from_scratch,
)
from train.core.flags import with_optimizer
from train.core.processes.distributed import Cluster
from train.data.vocabulary import write_vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from train.bert.data import Data

MODULE = "train.pretrain"


def parse(arguments: Sequence[str]) -> Command[PretrainConfig]:
    """Reads the flags; a preset, or a run that goes on, has those not given."""
    given = parse_flags(PretrainConfig(), arguments, MODULE)
    config = given.training
    if config.resume or config.preset is None:
        return given
    preset = with_optimizer(PRESETS[config.preset], config.optimizer)
    if config.vocab:
        preset = replace(preset, vocab_size=None)
    given = read_flags(preset, arguments, MODULE)
    if given.training.long_seq is None:  # its second phase is left out
        given = replace(given, training=without_second_phase(given.training))
    return given


def pretrain(
    config: PretrainConfig,
    timeout: float = Cluster.timeout,
) -> None:
    """Trains what the flags ask for, the same in all processes, and draws the picture.

    Raises:
      InputError: The flags, or what they name, cannot be used.
      LostError: Another process is gone, or takes longer than `timeout` seconds.
    """
    check(config)

    def about(data: Data) -> str:
        pieces = f"{len(data.vocabulary):,} word pieces"
        return f"BERT {config.model}, {pieces}, {data.about}"

    def keep_files(data: Data, folder: Path) -> None:
        # A run that goes on has it, unless it was lost.
        if not (config.resume and (folder / VOCABULARY_FILE).exists()):
            write_vocabulary(folder / VOCABULARY_FILE, data.vocabulary)

    train_from_scratch(
        config,
        MODULE,
        timeout,
        load=load,
        about=about,
        make_task=make_task,
        keep_files=keep_files,
        # Hugging Face's BERT has no Pre-LayerNorm.
    )


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence."""
    run_command(parse, check, pretrain)
