"""The convergence study compares like with like, and trains nothing twice."""

import filecmp
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from runs import SMALL, write_corpus

import onebit_jax
from benchmarks.convergence.arms import (
    ADAM,
    ARMS,
    NO_FEEDBACK,
    ONEBIT_ADAM,
    optimizer,
)
from benchmarks.convergence.config import Config
from benchmarks.convergence.report import beside, text
from benchmarks.convergence.run import Case, Run, Shared, train
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.study import study
from train.core import metrics_log


def run_of(case: Case, loss: float) -> Run:
    return Run(
        case, case.freeze if case.freeze != "auto" else 77, {10: loss}, 5 * 10**6
    )


@pytest.fixture
def small(tmp_path):
    """A study of a text that is quickly looked through."""
    text = tmp_path / "text.txt"
    text.write_text("The line a.\n")
    return Config(out=tmp_path / "c", shared=Shared((text,)))


@pytest.fixture
def known(monkeypatch):
    """Runs whose loss is a function of their case, and the list of what was trained."""
    trained = []

    def of(self, case):
        if case not in self._done:
            trained.append(case)
            best = 2e-3 if case.arm == ADAM else 1e-3
            loss = 5 + abs(case.learning_rate - best) + case.seed / 10
            self._done[case] = run_of(case, loss)
        return self._done[case]

    monkeypatch.setattr(Runs, "of", of)
    return trained


def test_every_arm_runs_at_adams_best_and_onebit_adam_at_its_own_too(known, small):
    config = replace(small, learning_rates=(1e-3, 2e-3, 3e-3))
    found = study(config, Runs(config), lambda so_far: None)
    assert len(known) == len(set(known))
    assert set(found.arms) == set(ARMS)
    for runs in found.arms.values():
        assert [run.case.seed for run in runs] == [3, 4, 5]
        assert {run.case.learning_rate for run in runs} == {2e-3}
        assert {run.case.workers for run in runs} == {8}
    assert [run.case.seed for run in found.tuned_onebit] == [3, 4, 5]
    assert {run.case.learning_rate for run in found.tuned_onebit} == {1e-3}
    assert set(found.workers) == {8, 16, 32}
    for workers, pair in found.workers.items():
        for runs in pair.values():
            assert [run.case[2:4] for run in runs] == [(3, workers)]
    order = [case.seed for case in known if case[1:2] + case[3:] == (2e-3, 8, 300)]
    assert order == sorted(order), "a study cut short compares all arms"
    assert {run.case.freeze for run in found.freezes} == {30, 75, 150, 300, 450, "auto"}
    assert {run.case.seed for run in found.freezes} == {3}


def test_adam_is_compared_on_the_seeds_that_have_ended(known, small):
    config = replace(small, learning_rates=(2e-3,))
    shown = []
    study(config, Runs(config), lambda so_far: shown.append(text(so_far)))
    # The tuning at the one rate is of the first seed; then comes 1-bit Adam's.
    assert "onebit_adam" not in shown[0]
    assert shown[1].splitlines()[-1].split(" | ")[1:4] == ["5.3010", "5.3010", "+0.02%"]
    assert "`freeze_when_stable`" in shown[-1]


def test_beside_adam_compares_equal_seeds():
    adam = [run_of(Case(ADAM, 1.0, seed, 8, 2), 4.0 + seed) for seed in (0, 1)]
    own = [run_of(Case(ONEBIT_ADAM, 1.0, seed, 8, 2), 5.5) for seed in (1, 2)]
    assert beside(own, adam) == pytest.approx(0.1)
    assert beside(own[1:], adam) is None


def test_the_json_is_read_again(small, monkeypatch, tmp_path):
    config = small
    case = Case(ONEBIT_ADAM, 1e-3, 0, 8, "auto")
    runs = Runs(config)
    runs._done[case] = run_of(case, 5.0)
    runs._write()
    monkeypatch.setattr("benchmarks.convergence.runs.ProcessPoolExecutor", None)
    assert Runs(config).of(case) == run_of(case, 5.0)
    for file, changes in {"a": {"steps": 7}, "b": {}}.items():
        (tmp_path / "text.txt").write_text(f"The line {file}.\n")
        with pytest.raises(SystemExit, match="other settings"):
            Runs(replace(config, shared=replace(config.shared, **changes)))


@pytest.mark.slow
def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_corpus(corpus)
    shared = Shared((corpus,), "tiny", steps=6, warmup_steps=2, batch=16, seq=16)
    case = Case(ONEBIT_ADAM, 1e-3, 0, 2, 3)

    def trained(folder):
        return train(shared, case, tmp_path / folder, tmp_path / "tokens", SMALL)

    whole = trained("whole")

    append = metrics_log.append

    def interrupt(folder, metrics):
        if metrics.step == 5:
            raise KeyboardInterrupt
        append(folder, metrics)

    monkeypatch.setattr(metrics_log, "append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trained("parts")
    monkeypatch.undo()
    assert trained("parts") == whole
    assert list(whole.eval_losses) == list(range(1, 7))
    assert whole.frozen_at == 3
    weights = "model/model.safetensors"
    assert filecmp.cmp(
        tmp_path / "whole" / weights, tmp_path / "parts" / weights, shallow=False
    )


@pytest.mark.parametrize("arm", [ONEBIT_ADAM, NO_FEEDBACK])
def test_only_the_arm_without_error_feedback_forgets(arm):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = optimizer(arm, lambda _: 0.1, onebit_jax.freeze_at(1))
    run = onebit_jax.data_parallel(
        lambda p, x: jnp.mean((p["kernel"] - x[0]) ** 2), tx, mesh
    )
    params, state = run.init({"kernel": jnp.zeros(4096)})
    batch = jax.random.normal(jax.random.key(0), (8, 4096))
    for _ in range(3):
        params, state, _ = run.step(params, state, batch)
    errors = [
        leaf
        for node in jax.tree.leaves(
            state, is_leaf=lambda n: isinstance(n, onebit_jax.WorkerLocal)
        )
        if isinstance(node, onebit_jax.WorkerLocal)
        for leaf in jax.tree.leaves(node)
    ]
    assert errors
    forgotten = all(not leaf.any() for leaf in errors)
    assert forgotten == (arm == NO_FEEDBACK)
