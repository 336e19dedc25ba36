"""After a fault, going on with fewer or more workers: the sum of the errors stays."""

import os
import shutil
import signal
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from launching import arrays_of, by_path
from runs import SMALL, steps_of

from train.bert.objective import abstract_params
from train.core.checkpoint import Checkpoints, latest_step
from train.core.exchange import make_exchange
from train.core.mesh import make_mesh
from train.core.optimizer import freeze_rule, learning_rate_schedule, make_optimizer

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
    [("flat", 1), ("flat", 4), ("hierarchical", 1), ("hierarchical", 4)],
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


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("form", ["flat", "counts", "hierarchical"])
def test_another_number_of_workers_keeps_the_residual(killed, form, workers):
    out = killed(form)
    words = (out / "vocab.txt").read_text().splitlines()
    model = replace(SMALL, vocab_size=len(words))
    mesh = make_mesh(workers, "hierarchical" if form == "hierarchical" else "flat")
    tx = make_optimizer(
        "onebit_adam",
        learning_rate_schedule(1e-3, 2, STEPS),
        freeze_rule(12, 2, STEPS),
        make_exchange(mesh, "count_mean" if form == "counts" else "sign_mean"),
        weight_decay=0.01,
        clip=1.0,
    )
    with closing(Checkpoints(out, {})) as checkpoints:
        restored, _ = checkpoints.restore(tx, abstract_params(model), mesh)
    saved = arrays_of(out, latest_step(out))
    placed = by_path({"state": restored.state})
    compared = 0
    for path, before in saved.items():
        if "error" not in path or not before.size:
            continue
        after = placed[path]
        if "worker_error" in path or "small_error" in path:
            before, after = before.mean(axis=0), after.mean(axis=0)
            compared += bool(before.any())
        assert_equal_but_for_padding(before.ravel(), after.ravel())
    assert compared


def assert_equal_but_for_padding(one, other):
    both = min(one.size, other.size)
    np.testing.assert_allclose(one[:both], other[:both], rtol=1e-5, atol=1e-9)
    assert not one[both:].any()
    assert not other[both:].any()
