"""The training loop, over a task of a few numbers."""

import shutil
import time
from dataclasses import replace

import grain
import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
import pytest
from launching import arrays_of
from runs import PROMOTION, steps_of, without_speed

import onebit_jax
from train.core import loop, metrics_log
from train.core.batches import batches
from train.core.checkpoint import latest_step
from train.core.errors import InputError
from train.core.flags import TrainingFlags
from train.core.loop import train
from train.core.mesh import make_mesh
from train.core.optimizer import Plan
from train.core.processes.watchdog import Watchdog
from train.core.task import Task, planned_phase

WORKERS, BATCH, SIZE = 4, 8, 4096
STEPS, FREEZE, RISE, PEAK = 9, 4, 2, 0.01
SECOND = 5  # steps of a second phase
MEASURED = 8  # the step of the first that measures the growth
NONE = -1  # a step that there is not


KILLED_AFTER = (
    1,  # only the checkpoint of step 0 is there
    FREEZE + 1,  # the newest one is at the freeze
    STEPS + 1,  # the newest one is at the end of the first phase
    STEPS + FREEZE + 1,
)


class Run:
    """A task in a folder of its own, and what it was asked for and told."""

    def __init__(
        self, folder, *, optimizer="onebit_adam", tx=None, freeze=FREEZE, bad=NONE
    ):
        self.optimizer, self.tx, self.freeze, self.bad = optimizer, tx, freeze, bad
        self.folder, self.finished, self.evaluated, self.held = folder, [], [], []
        self.begun = []
        self.copied_after = ()
        folder.mkdir(exist_ok=True)

    def train(
        self,
        *,
        until=STEPS,
        workers=WORKERS,
        topology="flat",
        second=0,
        eval_every=3,
        **settings,
    ):
        self.eval_every = eval_every
        mesh = make_mesh(workers, topology)
        phases = [self.phase(mesh, 0, STEPS)]
        if second:
            phases.append(self.phase(mesh, STEPS, STEPS + second))
        task = Task(
            name=self.optimizer,
            model={"size": SIZE},
            init=lambda: {"kernel": jnp.zeros(SIZE)},
            phases=phases,
            finish=lambda params: self.finished.append(jax.device_get(params)),
        )
        every = {"log_every": 1, "checkpoint_every": 2} | settings
        flags = TrainingFlags(out=self.folder, **every)
        with PROMOTION, Watchdog(300) as watchdog:
            return train(task, flags, until + second, mesh, watchdog)

    def phase(self, mesh, earlier, last):
        def loss(params, batch, step):
            noise = jax.random.normal(jax.random.key(step), (SIZE,)) / 10
            x = jnp.where(step == self.bad, jnp.nan, batch.mean(axis=0))
            return jnp.mean(jnp.square(params["kernel"] - x - noise))

        def example(index, rng):
            del index
            return rng.normal(size=SIZE).astype(np.float32) + 1

        plan = Plan(
            steps=last - earlier,
            earlier_steps=earlier,
            batch=BATCH,
            learning_rate=PEAK,
            warmup=RISE,
            freeze=self.freeze,
        )
        data = grain.MapDataset.range(20).seed(earlier).shuffle().repeat()
        phase = planned_phase(
            TrainingFlags(optimizer=self.optimizer, weight_decay=0.0, clip=0.0),
            plan,
            last,
            mesh,
            loss=loss,
            batches=batches(data.random_map(example), BATCH),
            evaluation=self.compiled,
            eval_every=self.eval_every,
        )
        return replace(phase, tx=self.tx) if self.tx else phase

    def compiled(self, params):
        self.begun.append(jax.device_get(params))
        return self.evaluate

    def evaluate(self, params):
        step = steps_of(self.folder)[-1]["step"]
        self.held.append(sum(x.nbytes for x in jax.live_arrays()))
        if step in self.copied_after:
            shutil.copytree(self.folder, self.folder.parent / f"killed-{step}")
        self.evaluated.append(step)
        mean = float(jnp.mean(params["kernel"]))
        return {"loss": mean, "share": mean / 2}


def assert_same(one, other):
    """Two runs have ended alike, to the last bit."""
    newest = latest_step(one.folder)
    ours, theirs = (arrays_of(run.folder, newest) for run in (one, other))
    assert ours.keys() == theirs.keys()
    differing = [k for k in ours if ours[k].tobytes() != theirs[k].tobytes()]
    assert not differing
    assert any("small_error" in k and ours[k].any() for k in ours)
    lines = [without_speed(metrics_log.read(run.folder)) for run in (one, other)]
    assert lines[0] == lines[1]
    np.testing.assert_array_equal(one.finished[-1]["kernel"], ours["params.kernel"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two phases that was not interrupted, and copies as kills leave it.

    SIGKILL leaves on the disk what is there at the time, and no more.
    """
    run = Run(tmp_path_factory.mktemp("runs") / "whole")
    run.copied_after = KILLED_AFTER
    run.totals = run.train(second=SECOND, eval_every=1)
    return run


def test_a_line_a_step_with_bytes_by_stage(whole):
    lines = steps_of(whole.folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + SECOND + 1))
    # The second phase has an optimizer of its own.
    own = [*range(STEPS), *range(SECOND)]
    stages = ["warmup" if step < FREEZE else "compressed" for step in own]
    stages[MEASURED - 1] = "compressed/measuring"
    assert [line["stage"] for line in lines] == stages
    rates = {line["stage"]: line["sent_bytes"] for line in lines}
    assert 7 < rates["warmup"] / rates["compressed"] < 8.2
    expected = np.cumsum([rates[stage] for stage in stages])
    totals = [line["total_sent_bytes"] for line in lines]
    np.testing.assert_array_equal(totals, expected)
    assert whole.totals.total_bytes == expected[-1]
    after = {"compressed/measuring": 0, "compressed": SECOND - FREEZE}
    assert whole.totals.by_stage == {"warmup": FREEZE, **after}
    learning_rates = [line["learning_rate"] for line in lines]
    for first, steps in (0, STEPS), (STEPS, SECOND):
        np.testing.assert_allclose(
            learning_rates[first : first + steps],
            np.interp(
                range(steps), [0, 1, RISE, steps], [PEAK / 2, PEAK, PEAK, PEAK / 10]
            ),
            rtol=1e-5,
        )
    # What the optimizer's state says after each step.
    measures = [line["optimizer"] for line in lines]
    assert [m["count"] for m in measures] == [step + 1 for step in own]
    assert [m["compressed"] for m in measures] == [step + 1 >= FREEZE for step in own]
    # It learns, and the second phase goes on with the parameters of the first.
    losses = [line["loss"] for line in lines]
    assert losses[STEPS] < losses[0]
    assert losses[-1] < losses[STEPS]
    assert all(line["examples_per_second"] > 0 for line in lines)


def test_it_evaluates_logs_and_saves_when_asked_and_at_the_end(tmp_path):
    run = Run(tmp_path / "run", optimizer="adam")
    run.train(log_every=2, eval_every=4, checkpoint_every=4)
    assert [line["step"] for line in steps_of(run.folder)] == [2, 4, 6, 8, 9]
    lines = metrics_log.read(run.folder)
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8, 9]
    assert run.evaluated == [4, 8, 9]
    assert lines[2].keys() == {"step", "eval_loss", "eval_share"}
    assert lines[2]["eval_share"] == lines[2]["eval_loss"] / 2
    checkpoints = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert checkpoints == {"8", "9"}  # the last two
    assert set(lines[0]) == set(metrics_log.StepMetrics.__dataclass_fields__)
    # An optimizer without stages sends as much in every step.
    ((stage, rate),) = {(x["stage"], x["sent_bytes"]) for x in steps_of(run.folder)}
    assert (stage, rate * STEPS) == ("every", lines[-2]["total_sent_bytes"])
    assert rate == pytest.approx(2 * 3 / 4 * 4 * SIZE, rel=0.01)


def with_local_steps(folder):
    """A run whose workers step alone, but in every fifth after the first."""
    tx = onebit_jax.zero_one_adam(
        PEAK, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(1),
        sync=onebit_jax.every(5),
    )  # fmt: skip
    return Run(folder, tx=tx)


def test_parameters_stay_in_local_steps_until_the_next_exchange(tmp_path):
    run = with_local_steps(tmp_path / "run")
    run.train(until=6, eval_every=1)
    stages = [line["stage"] for line in steps_of(run.folder)]
    assert stages == ["variance", *["local"] * 4, "compressed"]
    lines = metrics_log.read(run.folder)
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert losses[:5] == losses[:1] * 5
    assert losses[5] != losses[4]
    assert np.mean(run.finished[-1]["kernel"]) == pytest.approx(losses[-1], rel=1e-5)


# Of other workers its steps are converted first.
@pytest.mark.parametrize("workers", [pytest.param(WORKERS, marks=pytest.mark.slow), 2])
def test_a_phase_begins_where_local_steps_have_ended(tmp_path, workers):
    run = with_local_steps(tmp_path / "run")
    run.train()
    assert steps_of(run.folder)[-1]["stage"] == "local"
    run.train(second=SECOND, workers=workers)
    (_, begun), ended = run.begun, run.finished[0]
    np.testing.assert_allclose(begun["kernel"], ended["kernel"], rtol=1e-6)


def test_only_the_time_of_steps_is_counted(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", optimizer="adam")
    monkeypatch.setattr(Run, "evaluate", lambda *_: time.sleep(1) or {"loss": 0.0})
    run.train(until=2, log_every=2, eval_every=1)
    (line,) = steps_of(run.folder)
    assert line["examples_per_second"] > 2 * BATCH / 1.0  # of the first evaluation


@pytest.mark.parametrize(
    "step",
    [pytest.param(n, marks=[pytest.mark.slow] * (n > FREEZE)) for n in KILLED_AFTER],
)
def test_a_run_killed_at_any_moment_goes_on_bit_by_bit(whole, step, capsys):
    run = Run(whole.folder.parent / f"killed-{step}")
    assert steps_of(run.folder)[-1]["step"] == step
    # What a process killed while it writes leaves: half a line.
    with (run.folder / metrics_log.FILE).open("a") as file:
        file.write('{"step": 9')
    before = latest_step(run.folder)
    run.train(second=SECOND, eval_every=1)
    said = f"from the checkpoint of step {before}, and trains again the steps up to "
    assert (said + f"{step}, of" in capsys.readouterr().out) == (before < step)
    assert run.evaluated == list(range(before + 1, STEPS + SECOND + 1))
    assert_same(run, whole)


def test_a_run_that_is_stopped_says_what_it_goes_on_from(tmp_path, monkeypatch):
    def stop(folder, metrics, append=metrics_log.append):
        append(folder, metrics)
        if metrics.step == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(metrics_log, "append", stop)
    run = Run(tmp_path / "run", optimizer="adam")
    with pytest.raises(KeyboardInterrupt, match=r"--resume goes on from step 4$"):
        run.train()


def test_nothing_of_a_phase_is_held_in_the_next(whole):
    parameters = 4 * SIZE
    assert whole.held[-1] < whole.held[STEPS - 1] + parameters


def test_a_run_that_has_ended_is_only_finished_again(whole):
    before = (whole.folder / metrics_log.FILE).read_bytes()
    totals = whole.train(second=SECOND)
    assert totals == whole.totals
    assert (whole.folder / metrics_log.FILE).read_bytes() == before
    first, second = whole.finished[0]["kernel"], whole.finished[-1]["kernel"]
    np.testing.assert_array_equal(first, second)


def test_it_goes_on_to_more_steps_with_other_workers(tmp_path, capsys):
    run = Run(tmp_path / "run")
    run.train()
    before = steps_of(run.folder)[-1]
    run.train(until=STEPS + 2, workers=2)
    assert "converted from 4 workers to 2" in capsys.readouterr().out
    after = steps_of(run.folder)[-1]
    assert (after["step"], after["stage"]) == (STEPS + 2, "compressed")
    # Of fewer workers, each keeps a larger share of the values at home.
    assert 0.5 < after["sent_bytes"] / before["sent_bytes"] < 1
    total = before["total_sent_bytes"] + 2 * after["sent_bytes"]
    assert after["total_sent_bytes"] == total
    assert after["loss"] < before["loss"] + 0.1


def test_a_skipped_step_is_counted_and_changes_nothing(tmp_path, capsys):
    run = Run(tmp_path / "run", bad=1)
    run.train()
    lines = steps_of(run.folder)
    assert [line["skipped"] for line in lines] == [0] + [1] * (STEPS - 1)
    assert lines[1]["loss"] is None
    assert f"1 of {STEPS} steps were skipped, as their" in capsys.readouterr().out
    rates = [line["learning_rate"] for line in lines[:3]]
    assert rates[0] == rates[1] < rates[2]
    # The freeze comes a step later, and so does what is measured.
    stages = [line["stage"] for line in lines]
    compressed = ["compressed"] * (MEASURED - FREEZE - 1)
    assert stages == ["warmup"] * (FREEZE + 1) + compressed + ["compressed/measuring"]
    totals = np.cumsum([line["sent_bytes"] for line in lines])
    np.testing.assert_array_equal([x["total_sent_bytes"] for x in lines], totals)


@pytest.mark.parametrize("freeze", [FREEZE, STEPS])
def test_a_compressed_stage_that_never_came_is_told_of(tmp_path, capsys, freeze):
    """That nothing was measured in so few steps is nothing to be told of."""
    Run(tmp_path / "run", freeze=freeze).train(until=FREEZE + 1)
    sentence = "not frozen up to step 5: --freeze-step is 9 and the phase has 9 steps;"
    assert (sentence in capsys.readouterr().out) == (freeze == STEPS)


def test_all_processes_have_compiled_when_the_first_step_begins(tmp_path, monkeypatch):
    """One may have found its programs in the cache, and steps have a limit."""
    waits = []
    monkeypatch.setattr(Watchdog, "expect", lambda self, what: waits.append(what))
    monkeypatch.setattr(loop, "meet", lambda: waits.append("the others"))
    Run(tmp_path / "run", optimizer="adam").train(until=1)
    at = waits.index("the others")
    assert waits[at - 1 : at + 2] == ["", "the others", "step 1"]


@pytest.mark.parametrize(("clip", "told"), [(0.001, True), (1e6, False)])
def test_clipping_that_never_rests_is_told_of(tmp_path, capsys, clip, told):
    tx = optax.chain(
        onebit_jax.clip_by_worker_norm(clip, "data"),
        onebit_jax.exact_mean("data"),
        optax.sgd(PEAK),
    )
    Run(tmp_path / "run", tx=tx).train(until=2, clip=clip)
    sentence = (
        "100 % of the steps were clipped by --clip 0.001 (the last step's norm was"
    )
    assert (sentence in capsys.readouterr().out) == told


def test_a_picture_is_left(whole):
    image = matplotlib.image.imread(whole.folder / "training.png")
    height, width = image.shape[:2]
    assert width > 3 * height > 900  # loss, the share of the evaluations, bytes
    assert len(np.unique(image.sum(axis=2))) > 50


def test_metrics_without_a_checkpoint_are_refused(tmp_path):
    run = Run(tmp_path / "run")
    line = metrics_log.StepMetrics(1, 1.0, "warmup", 1, 1, 0, 0.1, 1.0, {})
    metrics_log.append(run.folder, line)
    with pytest.raises(InputError, match="there is no checkpoint in"):
        run.train()


@pytest.mark.parametrize(
    ("workers", "topology"), [(1, "flat"), (WORKERS, "hierarchical")]
)
def test_one_worker_is_told_that_it_does_not_compress(
    tmp_path, capsys, workers, topology
):
    """A worker is a device, or all devices of a host."""
    Run(tmp_path).train(workers=workers, topology=topology)
    said = capsys.readouterr().out
    assert "was not frozen up to step 9: one worker has nobody to send signs to" in said
    assert {line["stage"] for line in steps_of(tmp_path)} == {"warmup"}
