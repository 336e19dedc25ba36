"""After a fault, going on with fewer or more workers."""

import os
import shutil
import signal

import pytest
from runs import steps_of

from train.core.checkpoint import latest_step

STEPS = 40


@pytest.fixture(scope="session")
def killed(drills, tmp_path_factory):
    """A run of each form, left behind by a killed worker in the compressed stage."""
    made = {}

    def of(form):
        if form not in made:
            out = tmp_path_factory.mktemp(form) / "run"
            with drills(form).until(out, 22) as launched:
                os.kill(launched.workers[1], signal.SIGKILL)
                assert launched.end(30) == 128 + signal.SIGKILL
            made[form] = out
        return made[form]

    return of


@pytest.mark.parametrize(
    ("form", "processes"),
    [
        ("flat", 1),
        ("flat", 4),
        ("hierarchical", 1),
        ("hierarchical", 4),
        ("local", 1),
        ("local", 4),
    ],
)
def test_a_run_goes_on_with_other_processes(drills, killed, tmp_path, form, processes):
    drill, out = drills(form), tmp_path / "run"
    shutil.copytree(killed(form), out)
    lost_from = latest_step(out)
    said = drill.finish("--resume", "--out", out, processes=processes)
    before, now = 2 * drill.devices, processes * drill.devices
    assert f"converted from {before} workers to {now}" in said
    ours, theirs = steps_of(out), steps_of(drill.whole)
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    for one, other in zip(ours, theirs, strict=True):
        if one["step"] <= lost_from:
            assert one["loss"] == other["loss"]
        assert one["stage"] == other["stage"]
        # The same samples, the errors of other workers.
        assert one["loss"] == pytest.approx(other["loss"], abs=0.2)
    assert ours[-1]["loss"] < ours[0]["loss"]
