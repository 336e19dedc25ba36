"""A run's end is its last evaluation and the time of its steps."""

import pytest

from train.core.comparison import Ended, ended


def line(step, rate, sent=0):
    told = {"step": step, "stage": "every", "total_sent_bytes": sent}
    return told | {"examples_per_second": rate}


def test_seconds_are_those_of_each_stretch_of_steps():
    lines = [line(1, 4.0), line(5, 8.0), {"step": 5, "eval_loss": 3.0}]
    lines += [line(9, 2.0, 77), {"step": 9, "eval_loss": 2.5}]
    seconds = 8 / 4 + 4 * 8 / 8 + 4 * 8 / 2
    assert ended("adam", lines, 8) == Ended("adam", 2.5, 77, pytest.approx(seconds))


@pytest.mark.parametrize(
    "lines", [[], [line(1, 1.0)], [line(1, 1.0), {"eval_loss": None}]]
)
def test_a_run_without_a_loss_has_no_end(lines):
    assert ended("adam", lines, 8) is None
