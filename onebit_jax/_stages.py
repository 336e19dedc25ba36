"""The two stages of a run, and their names in a compiled program."""

from typing import Literal

Stage = Literal["warmup", "compressed"]

WARMUP_SCOPE = "onebit_warmup"
COMPRESSED_SCOPE = "onebit_compressed"
