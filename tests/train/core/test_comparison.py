"""A run's end is its last evaluation and the time of its steps."""

import pytest

from train.core.comparison import Ended, closing, ended
from train.core.optimizer import Plan


def line(step, rate, sent=0):
    told = {"step": step, "stage": "every", "total_sent_bytes": sent}
    return told | {"examples_per_second": rate}


def phases(*batches):
    """Of five steps each."""
    return [
        Plan(
            steps=5,
            earlier_steps=5 * i,
            batch=batch,
            learning_rate=1.0,
            warmup=1,
            freeze=1,
        )
        for i, batch in enumerate(batches)
    ]


@pytest.mark.parametrize("batches", [(8, 8), (8, 4), (8,)])
def test_seconds_are_those_of_each_stretch_of_steps(batches):
    """Also of a run that has gone on, and of phases with batches of their own."""
    lines = [line(1, 4.0), line(5, 8.0), {"step": 5, "eval_loss": 3.0}]
    lines += [line(9, 2.0), line(12, 4.0, 77), {"step": 12, "eval_loss": 2.5}]
    seconds = 8 / 4 + 4 * 8 / 8 + (4 / 2 + 3 / 4) * batches[-1]
    expected = Ended("adam", 2.5, 77, pytest.approx(seconds))
    assert ended("adam", lines, phases(*batches)) == expected


@pytest.mark.parametrize(
    "lines", [[], [line(1, 1.0)], [line(1, 1.0), {"eval_loss": None}]]
)
def test_a_run_without_a_loss_has_no_end(lines):
    assert ended("adam", lines, phases(8)) is None


def test_one_worker_that_sends_nothing_is_compared_by_its_loss_alone():
    exact = closing(Ended("adam", 0.0, 0, 8.0), Ended("onebit_adam", 0.02, 0, 9.0))
    assert "onebit_adam ends 0.0200 above adam" in exact
    table = closing(Ended("adam", 2.0, 0, 8.0), Ended("onebit_adam", 2.02, 0, 9.0))
    _, *rows, sentence, advice = table.splitlines()
    assert [row.split()[2:4] for row in rows] == [["0.0", "-"]] * 2
    assert sentence.startswith("onebit_adam ends 1.0 % above adam, and one worker has")
    assert advice.startswith("give more --workers")
