"""Steps and bytes by stage, and the lines that tell of them."""

import json

import pytest

from train.core import metrics_log, picture
from train.core.errors import InputError
from train.core.metrics_log import StepMetrics
from train.core.totals import EVERY, Totals, count

RATES = {"warmup": 100, "compressed": 3}


def later(totals, steps, frozen_at, skipped=0, rates=RATES):
    """As the state tells that was frozen after so many steps taken; 0 for not yet."""
    taken = steps - totals.earlier_steps - skipped
    warmup = frozen_at or taken
    told = {"warmup": warmup, "compressed": taken - warmup}
    return count(totals, steps, told, skipped, rates)


def test_bytes_are_counted_by_the_stage_each_step_ran_in():
    totals = later(Totals(), 4, 0, skipped=1)
    assert (totals.stage, totals.total_bytes) == ("warmup", 400)
    # Frozen after 5 steps that were taken and 1 that was not.
    totals = later(totals, 10, 5, skipped=1)
    assert totals.by_stage == {"warmup": 6, "compressed": 4}
    assert (totals.stage, totals.total_bytes) == ("compressed", 6 * 100 + 4 * 3)
    assert later(totals, 11, 5, skipped=2).total_bytes == 6 * 100 + 5 * 3
    # Frozen at the very step that is looked at: the next is the first compressed.
    totals = later(Totals(), 5, 5)
    assert (totals.stage, totals.total_bytes) == ("warmup", 500)
    assert later(totals, 6, 5).total_bytes == 503


def test_bytes_are_counted_on_in_a_second_phase():
    first = later(Totals(), 10, 4, skipped=1)
    assert first.total_bytes == 4 * 100 + 6 * 3
    second = first.at_phase_start()
    assert (second.stage, second.taken, second.total_skipped) == ("", 0, 1)
    second = later(second, 12, 0, skipped=1)
    assert (second.stage, second.taken, second.total_skipped) == ("warmup", 1, 2)
    second = later(second, 20, 4, skipped=1)
    assert second.by_stage == {"warmup": 5, "compressed": 5}
    assert second.total_bytes == first.total_bytes + 5 * 100 + 5 * 3


def test_stages_have_any_names_and_may_come_again():
    rates = {"sync": 50, "local": 0, "exact": 400}
    taken = {"sync": 1, "local": 7, "exact": 2}
    totals = count(Totals(), 10, taken, 0, rates)
    assert (totals.steps, totals.stage, totals.total_bytes) == (10, "exact", 850)
    totals = count(totals, 12, taken | {"sync": 2}, 1, rates)
    assert (totals.steps, totals.stage, totals.total_bytes) == (12, "sync", 950)
    totals = later(Totals(), 7, 0, rates={EVERY: 9})
    assert (totals.stage, totals.by_stage) == (EVERY, {EVERY: 7})
    assert totals.total_bytes == 63


def test_numbers_that_are_not_finite_are_written_as_json(tmp_path):
    measures = {"worker_error": float("inf"), "count": 3}
    metrics = StepMetrics(1, float("nan"), "warmup", 1, 1, 1, 0.1, 1.0, measures)
    metrics_log.append(tmp_path, metrics)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["loss"] is None
    assert line["optimizer"] == {"worker_error": None, "count": 3}
    picture.draw(tmp_path / "picture.png", {"adam": metrics_log.read(tmp_path)})


def test_a_damaged_line_of_the_metrics_is_named(tmp_path):
    for line in (b'{"step": 1}\n', b"\0\0\xff\n", b'{"step"'):
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(line)
    with pytest.raises(InputError, match=r"line 2 of .*metrics\.jsonl is damaged"):
        metrics_log.read(tmp_path)


def test_a_run_whose_loss_has_risen_says_so():
    def line(step, loss):
        return {"step": step, "loss": loss, "total_sent_bytes": 10**6 * step}

    calm = metrics_log.summary([line(1, 2.0), line(2, None), line(3, 2.3)])
    assert calm == "step 3, loss 2.3000, 3.0 MB sent by a worker"
    risen = metrics_log.summary([line(1, 2.0), line(3, 2.5)])
    assert "the loss has risen, from 2.0000: give a new run a smaller" in risen
    for lost in ([line(2, None)], [line(1, 2.0), line(2, None)]):
        said = metrics_log.summary(lost)
        assert said.startswith("step 2, 2.0 MB sent by a worker; the loss is not fin")
    assert metrics_log.summary([]) == "metrics.jsonl has no step"
