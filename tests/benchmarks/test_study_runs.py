"""The runs of a study: simulated as real ones are, counted, never trained twice."""

from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import grain
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import PROMOTION, write_corpus

import onebit_jax
from benchmarks.convergence import training
from benchmarks.convergence.arms import make_arm, with_arm
from benchmarks.convergence.command import complete
from benchmarks.convergence.picture import drawn_study
from benchmarks.convergence.plan import read_plan
from benchmarks.convergence.runs import Case, Run, Store
from benchmarks.convergence.simulation import run_of, simulate
from benchmarks.convergence.tasks import MODULES, read_flags
from benchmarks.convergence.training import Training, train_case
from models import DECODER_SIZES
from train.core import metrics_log
from train.core.loop import train
from train.core.mesh import make_mesh
from train.core.processes.session import watched
from train.core.task import Phase, Task


class HereAtOnce(Executor):
    """An executor in this process, one run at a time."""

    def submit(self, work, training):
        future = Future()
        future.set_result(work(training))
        return future


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A plan's file with a task of three steps, that of seconds."""
    tiny = replace(DECODER_SIZES["nano"], hidden_size=16, num_layers=1, num_heads=1)
    monkeypatch.setattr("train.lm.task.DECODER_SIZES", {"nano": tiny})
    flags = "--workers 2 --steps 3 --batch 4 --seq 8 --warmup-steps 1 --freeze-step 2"
    flags += " --eval-every 1 --eval-sequences 4 --checkpoint-every 1 --log-every 1"
    (tmp_path / "text").mkdir()
    flags += f" --corpus {write_corpus(tmp_path / 'text')}"
    file = tmp_path / "small.toml"
    file.write_text(
        f"""
        title = "A small study"
        rule = "None."
        tasks.text.module = "train.lm"
        tasks.text.flags = {flags.split()}
        tasks.text.learning_rate = [1e-3]
        arms.Adam = {{ optimizer = "adam" }}
        arms.Nesterov = {{ optimizer = "adam", nesterov = true }}
        rounds = [{{ name = "all", seeds = [0], arms = ["Adam", "Nesterov"] }}]
        """
    )
    return file


def complete_here(file, plan):
    """Trains what is left, in this process, and gives all runs."""
    store = Store(file.with_suffix(".json"), plan)
    with PROMOTION:
        complete(plan, file, file.parent / "runs", store, HereAtOnce(), 1)
    return store.runs


CASE = Case("text", "sign", 0.1, 0.9, 0)


def local_steps(evaluation):
    """A task of four steps, the last three of each worker alone."""
    tx = onebit_jax.zero_one_adam(
        0.1, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(1),
        sync=onebit_jax.every(4),
    )  # fmt: skip
    phase = Phase(
        loss=lambda params, batch, step: jnp.mean(
            (params - batch.mean(axis=0)) ** 2
        ),
        batches=grain.MapDataset.source(np.ones((4, 2, 3), np.float32)),
        batch=2, tx=tx, schedule=optax.schedules.constant_schedule(0.1), last=4,
        evaluation=lambda params: evaluation,
    )  # fmt: skip
    return Task(name="", model={}, init=lambda: jnp.zeros(3), phases=[phase])


def test_simulated_workers_are_evaluated_where_they_last_agreed(tmp_path):
    task = local_steps(lambda params: {"loss": float(params[0])})
    run = simulate(task, 2, make_mesh(1, "flat"), tmp_path / "state.npz", CASE)
    assert run.taken[4] == {"variance": 1, "compressed": 0, "local": 3}
    losses = [run.evaluations[step]["loss"] for step in range(1, 5)]
    assert losses == losses[:1] * 4


def test_a_training_that_is_interrupted_goes_on_from_its_last_evaluation(tmp_path):
    def evaluation(params):
        seen.append(float(params[0]))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return {"loss": seen[-1]}

    task, mesh, seen = local_steps(evaluation), make_mesh(1, "flat"), []
    with pytest.raises(KeyboardInterrupt):
        simulate(task, 2, mesh, tmp_path / "state.npz", CASE)
    cut = simulate(task, 2, mesh, tmp_path / "state.npz", CASE)
    assert len(seen) == 5, "after 1 and 2 steps, cut off after 3; then after 3 and 4"
    whole = simulate(task, 2, mesh, tmp_path / "another.npz", CASE)
    assert (cut.evaluations, cut.taken) == (whole.evaluations, whole.taken)


def test_bytes_of_skipped_steps_are_counted(tmp_path):
    options = {"optimizer": "onebit_adam"}
    batches = np.ones((6, 2, 2048), np.float32)
    batches[[1, 4]] = np.nan  # a step of the warm-up, and one of the compressed stage
    phase = Phase(
        loss=lambda params, batch, step: jnp.mean(
            (params["kernel"] - batch.mean(0)) ** 2
        ),
        batches=grain.MapDataset.source(batches),
        batch=2, schedule=optax.schedules.constant_schedule(0.1), last=6, eval_every=2,
        tx=make_arm(
            options, optax.schedules.constant_schedule(0.1), onebit_jax.freeze_at(2),
            0.9, weight_decay=0.0, clip=0.0, axes="data",
        ),
        evaluation=lambda params: lambda params: {"loss": 0.0},
    )  # fmt: skip
    task = Task(
        name="", model={}, init=lambda: {"kernel": jnp.zeros(2048)}, phases=[phase]
    )
    with PROMOTION:
        made = simulate(task, 2, make_mesh(1, "flat"), tmp_path / "state.npz", CASE)
        run = run_of(CASE, options, task, made, 2)
    assert run.skipped == 2
    assert {step: sum(n.values()) for step, n in run.stages.items()} == {
        2: 2,
        4: 4,
        6: 6,
    }
    assert run.stages[6]["warmup"] == 3
    warmup, measuring, compressed = run.rates.values()
    sent = run.sent_by_step()
    assert sent[2] == 2 * warmup
    assert sent[6] == run.sent_bytes
    assert compressed <= run.sent_bytes - 3 * warmup - 2 * compressed <= measuring


@pytest.mark.slow
def test_simulated_workers_train_as_real_ones_do(small):
    plan, options = read_plan(small), {"optimizer": "onebit_adam", "warmup_bits": 4}
    case, folder = Case("text", "signs", 1e-3, 0.9, 0), small.parent
    text, mesh = plan.tasks["text"], make_mesh(2, "flat")
    flags = read_flags(text, out=folder / "real", tokens=folder / "tokens")
    flags = replace(flags, learning_rate=1e-3)
    with PROMOTION:
        run = train_case(
            Training(case, text, options, folder / "runs", folder / "tokens")
        )
        task = with_arm(
            MODULES[text.module].open(flags, mesh), flags, options, 0.9, mesh.axis_names
        )
        with watched(60.0) as watchdog:
            totals = train(task, flags, 3, mesh, watchdog)
    losses = [x["eval_loss"] for x in metrics_log.read(flags.out) if "eval_loss" in x]
    simulated = [means["loss"] for means in run.evaluations.values()]
    assert simulated == pytest.approx(losses, rel=1e-5)
    assert run.sent_bytes == pytest.approx(totals.total_bytes, rel=0.02)
    assert [run.stages[n]["warmup"] for n in run.stages] == [1, 2, 2]
    assert [sum(run.stages[n].values()) for n in run.stages] == [1, 2, 3]
    assert run.sent_by_step()[3] == run.sent_bytes
    arms = {"signs": options}
    rounds = (replace(plan.rounds[0], arms=("signs",)),)
    drawing = replace(plan, arms=arms, rounds=rounds, picture="bytes")
    (axes,) = drawn_study(drawing, {case: run}).axes
    sent = [x / 1e6 for x in run.sent_by_step().values()]
    assert [list(line.get_xdata()) for line in axes.lines] == [sent]


@pytest.mark.slow
def test_an_interrupted_study_goes_on_and_trains_nothing_twice(
    small, monkeypatch, capsys
):
    file, plan, trained = small, read_plan(small), []

    def interrupt(*arguments):
        trained.append(arguments)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return simulate(*arguments)

    def study():
        return complete_here(file, plan)

    monkeypatch.setattr(training, "simulate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        study()
    study()
    assert len(trained) == 3, "the second run begins again, and the first does not"
    adam, nesterov = study().values()
    assert len(trained) == 3
    assert [r.case.arm for r in (adam, nesterov)] == ["Adam", "Nesterov"]
    assert list(adam.evaluations) == list(nesterov.evaluations) == [1, 2, 3]
    assert adam.loss != nesterov.loss
    assert not list((file.parent / "runs/small").iterdir())
    assert "0 left" in capsys.readouterr().out.splitlines()[-1]
    assert "## all: text" in file.with_suffix(".md").read_text()


class AllAtOnce(Executor):
    """An executor whose runs have ended before it is waited for, some by errors."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def submit(self, work, training):
        future = Future()
        if error := self.errors.pop(0):
            future.set_exception(error)
        else:
            future.set_result(Run(training.case, {}, {1: {"loss": 4.0}}, 0, 0, 0, {}))
        return future


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            SystemExit("no text"),
            r"text, Adam, 0.001, b1 0.9, seed 0 has failed "
            r"\(SystemExit: no text\); its log is .*/small/text-\w+/log.txt: start",
        ),
        (BrokenProcessPool(), "a process was killed, of: text, Adam, .*; give fewer"),
    ],
)
def test_a_run_that_fails_is_named_and_those_that_have_ended_are_kept(
    small, error, message
):
    plan = read_plan(small)
    store = Store(small.with_suffix(".json"), plan)
    with pytest.raises(SystemExit, match=message):
        complete(plan, small, small.parent, store, AllAtOnce(error, None), 2)
    assert [case.arm for case in store.runs] == ["Nesterov"]


def run_of_adam(file):
    plan, case = read_plan(file), Case("text", "Adam", 1e-3, 0.9, 0)
    settings = plan.tasks["text"], plan.arms["Adam"]
    return Training(case, *settings, file.parent / "runs", file.parent / "tokens")


def test_the_log_of_a_run_that_fails_says_where(small, monkeypatch):
    def fail(*given):
        raise KeyError("key")

    run = run_of_adam(small)
    monkeypatch.setattr(training, "_train", fail)
    with pytest.raises(KeyError):
        train_case(run)
    assert "in fail" in (run.folder / training.LOG).read_text()


def test_a_run_goes_on_by_the_code_that_began_it(small, monkeypatch):
    run = run_of_adam(small)
    began = run.folder
    assert began == run.folder
    monkeypatch.setattr(training, "code", lambda: "another")
    assert run.folder != began
