"""`python -m train.pretrain` with a BERT so small that many processes start soon."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from runs import SMALL

from train.bert import pretrain, task

if __name__ == "__main__":
    task.SIZES = {"tiny": SMALL}
    pretrain.main()
