"""`python -m train.lm`: trains a causal language model with 1-bit Adam.

`--help` lists the flags. A run leaves in its folder `config.json` (what was asked
for), `checkpoints`, `metrics.jsonl`, `training.png`, the text as `tokens`, and
`tokenizer.json` if it was given one; with `--compare` plain Adam's own and those of
local steps are in the folders `adam` and `local` inside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.core.commands import Command, parse_flags, run_command, train_from_scratch
from train.core.processes.distributed import Cluster
from train.lm.config import LmConfig, check
from train.lm.data import keep_tokenizer, load
from train.lm.task import make_task

if TYPE_CHECKING:
    from collections.abc import Sequence

MODULE = "train.lm"


def parse(arguments: Sequence[str]) -> Command[LmConfig]:
    """Reads the flags; a run that goes on has its own for those not given."""
    return parse_flags(LmConfig(), arguments, MODULE)


def train_lm(
    config: LmConfig,
    timeout: float = Cluster.timeout,
) -> None:
    """Trains what the flags ask for, the same in all processes, and draws the picture.

    Raises:
      InputError: The flags, or what they name, cannot be used.
      LostError: Another process is gone, or takes longer than `timeout` seconds.
    """
    check(config)
    train_from_scratch(
        config,
        MODULE,
        timeout,
        load=load,
        about=lambda data: f"decoder {config.model}, {data.coding.vocab_size:,} tokens",
        make_task=make_task,
        keep_files=lambda data, folder: keep_tokenizer(
            data.coding, folder, goes_on=config.resume
        ),
    )


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence."""
    run_command(parse, check, train_lm)
