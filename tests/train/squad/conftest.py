"""A SQuAD file that a small model learns in a few steps."""

import pytest
from fine_tuning import write_squad


@pytest.fixture
def files(tmp_path):
    """The flags of a run that learns from it, with its vocabulary."""
    return write_squad(tmp_path)
