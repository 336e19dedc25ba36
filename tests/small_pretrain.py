"""`python -m train.pretrain` with a BERT so small that many processes start soon."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from models import SIZES
from train.bert import pretrain
from train.core import loop, program

SMALL = replace(
    SIZES["tiny"],
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    intermediate_size=64,
    max_positions=32,
)

if __name__ == "__main__":
    program.EVAL_SEQUENCES = 8
    loop.SIZES = {"tiny": SMALL}
    pretrain.main()
