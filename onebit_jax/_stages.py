"""The two stages of a run, and their names in a compiled program."""

from typing import Literal, get_args

Stage = Literal["warmup", "compressed"]

WARMUP_SCOPE = "onebit_warmup"
COMPRESSED_SCOPE = "onebit_compressed"


def check_stage(stage: object) -> None:
    """Raises ValueError if that is neither a stage nor None."""
    if stage is not None and stage not in get_args(Stage):
        raise ValueError(
            f"stage must be None, 'warmup' or 'compressed', got {stage!r}."
        )
