"""The application: what a run leaves behind, and that it goes on exactly."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import chex
import jax
import matplotlib.image
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from runs import (
    FREEZE,
    PROMOTION,
    STEPS,
    WARMUP,
    resume,
    small_config,
    steps_of,
    write_corpus,
)

from models import SIZES
from train.bert.config import PretrainConfig
from train.bert.pretrain import pretrain
from train.core import loop, program, run_folder
from train.core import metrics_log as record
from train.core.errors import InputError
from train.core.metrics_log import EvalMetrics, StepMetrics
from train.plan.wire_formulas import line_count

# The last checkpoint before each is in the warm-up, at the freeze, after it.
KILLED_AFTER = {"warm-up": 3, "freeze": 5, "compressed": 7}
ROOT = Path(__file__).parents[3]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _quick(tmp_path_factory):
    """Compiles each small program once, and evaluates on little."""
    shared = tmp_path_factory.getbasetemp().parent / "compiled"
    before = jax.config.jax_compilation_cache_dir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "EVAL_SEQUENCES", 16)
        patch.setattr(loop, "SIZES", {"tiny": replace(SIZES["tiny"], num_layers=1)})
        jax.config.update("jax_compilation_cache_dir", str(shared))
        yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def config(corpus):
    return small_config(corpus)


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory, _quick):
    """A run that was not interrupted, and copies of it as a kill would leave it.

    SIGKILL leaves on the disk what is there at the time, and no more.
    """
    base = tmp_path_factory.mktemp("runs")
    out = base / "run"
    append = loop.record.append

    def append_and_copy(folder, metrics):
        append(folder, metrics)
        for name, step in KILLED_AFTER.items():
            if folder == out and metrics.step == step:
                shutil.copytree(out, base / name)

    with pytest.MonkeyPatch.context() as patch, PROMOTION:
        patch.setattr(loop.record, "append", append_and_copy)
        pretrain(replace(config, out=out))
    return out


@pytest.fixture
def single_run(finished, tmp_path):
    """A copy of the finished run without plain Adam beside it, to be gone on with."""
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "adam")
    stored = json.loads((run / "config.json").read_text())
    stored["flags"]["compare"] = False
    (run / "config.json").write_text(json.dumps(stored))
    return run


def evaluations_of(folder):
    return [line for line in record.read(folder) if "eval_loss" in line]


def last_arrays(folder, step):
    with (
        ocp.PyTreeCheckpointer() as checkpointer,
        pytest.warns(UserWarning, match="Sharding info not provided"),
    ):
        return checkpointer.restore(folder / "checkpoints" / str(step) / "arrays")


def without_speed(lines):
    return [
        {name: value for name, value in line.items() if name != "examples_per_second"}
        for line in lines
    ]


def test_metrics_have_a_line_a_step_and_a_line_an_evaluation(finished):
    for folder in (finished, finished / "adam"):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        parsed = [json.loads(line) for line in lines]
        assert {tuple(line) for line in parsed} == {
            tuple(StepMetrics.__dataclass_fields__),
            tuple(EvalMetrics.__dataclass_fields__),
        }
        assert [line["step"] for line in steps_of(folder)] == list(range(1, STEPS + 1))
        assert [line["step"] for line in evaluations_of(folder)] == [4, 8]
        assert all(np.isfinite(line["loss"]) for line in steps_of(folder))
        assert all(line["skipped"] == 0 for line in steps_of(folder))
        assert all(line["examples_per_second"] > 0 for line in steps_of(folder))


def test_the_stage_and_the_bytes_change_at_the_freeze(finished):
    lines = steps_of(finished)
    stages = [line["stage"] for line in lines]
    assert stages == ["warmup"] * FREEZE + ["compressed"] * (STEPS - FREEZE)
    warmup, compressed = lines[0]["sent_bytes"], lines[-1]["sent_bytes"]
    assert {line["sent_bytes"] for line in lines[:FREEZE]} == {warmup}
    assert {line["sent_bytes"] for line in lines[FREEZE:]} == {compressed}
    # A ring's all-reduce of float32 against 1 bit there and 1 bit back.
    params = last_arrays(finished, STEPS)["params"]
    size = sum(x.size for x in jax.tree.leaves(params))
    # In so small a model rows and columns are many.
    rows_and_columns = sum(map(line_count, jax.tree.leaves(params)))
    size += rows_and_columns
    assert warmup == pytest.approx(2 * 7 / 8 * 4 * size, rel=0.01)
    assert warmup > 25 * compressed
    totals = [line["total_sent_bytes"] for line in lines]
    np.testing.assert_array_equal(
        totals, np.cumsum([line["sent_bytes"] for line in lines])
    )
    adam = steps_of(finished / "adam")
    ((stage, sent),) = {(line["stage"], line["sent_bytes"]) for line in adam}
    assert stage == "warmup"
    # But for rows and columns, and a few scalars that the freeze is decided by.
    assert sent == pytest.approx(warmup - 7 * rows_and_columns, rel=1e-3)


def test_the_learning_rate_rises_and_falls(finished):
    rates = [line["learning_rate"] for line in steps_of(finished)]
    peak = PretrainConfig.learning_rate
    expected = np.interp(
        range(STEPS),
        [0, WARMUP - 1, WARMUP, STEPS],
        [peak / WARMUP, peak, peak, peak / 10],
    )
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_plain_adam_is_trained_on_the_same_samples(finished):
    # Before the freeze they are the same algorithm, by two programs.
    ours, adams = (
        [line["loss"] for line in steps_of(folder)]
        for folder in (finished, finished / "adam")
    )
    np.testing.assert_allclose(ours[: FREEZE + 1], adams[: FREEZE + 1], rtol=1e-4)
    assert ours[-1] != adams[-1]
    ours, adams = (
        evaluations_of(folder)[0] for folder in (finished, finished / "adam")
    )
    assert ours["eval_loss"] == pytest.approx(adams["eval_loss"], rel=1e-4)


def test_a_run_leaves_a_picture_a_vocabulary_and_its_configuration(finished, config):
    image = matplotlib.image.imread(finished / "training.png")
    assert min(image.shape[:2]) > 300
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 50
    assert "[MASK]" in (finished / "vocab.txt").read_text().splitlines()
    stored = json.loads((finished / "config.json").read_text())
    assert stored["flags"]["seq"] == config.seq
    assert stored["until"] == STEPS
    adams = json.loads((finished / "adam" / "config.json").read_text())
    assert adams["flags"]["optimizer"] == "adam"
    assert adams["corpus"] == stored["corpus"]


def recording(steps):
    """`compile_program`, whose programs tell which steps they were called for."""
    compile_program = loop.compile_program

    def compile_recording(*args):
        compiled = compile_program(*args)

        def step(params, state, batch, earlier_steps):
            steps.append(int(earlier_steps))
            return compiled.step(params, state, batch, earlier_steps)

        return compiled._replace(step=step)

    return compile_recording


@pytest.mark.parametrize(
    "moment",
    ["freeze", *(pytest.param(m, marks=SLOW) for m in ("warm-up", "compressed"))],
)
def test_a_killed_run_goes_on_bit_by_bit(finished, tmp_path, monkeypatch, moment):
    folder = shutil.copytree(finished.parent / moment, tmp_path / "run")
    killed_after = KILLED_AFTER[moment]
    assert steps_of(folder)[-1]["step"] == killed_after
    # What a process killed while it writes leaves: half a line.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')
    if moment != "warm-up":  # spares training Adam once more
        shutil.copytree(finished / "adam", folder / "adam")
    earlier_steps = []
    monkeypatch.setattr(loop, "compile_program", recording(earlier_steps))
    resume(folder)
    # They decide the dropout.
    checkpoint = killed_after - killed_after % 2
    adams = range(STEPS) if moment == "warm-up" else ()
    assert earlier_steps == [*range(checkpoint, STEPS), *adams]
    for arm in ("", "adam"):
        chex.assert_trees_all_equal(
            last_arrays(folder / arm, STEPS), last_arrays(finished / arm, STEPS)
        )
        assert without_speed(record.read(folder / arm)) == without_speed(
            record.read(finished / arm)
        )
    assert (folder / "training.png").exists()


@SLOW
def test_a_finished_run_goes_on_for_as_many_steps(single_run, capsys):
    resume(single_run)
    said = capsys.readouterr().out
    assert f"all {STEPS} steps are done; going on for {STEPS} more" in said
    lines = steps_of(single_run)
    assert [line["step"] for line in lines] == list(range(1, 2 * STEPS + 1))
    assert {line["stage"] for line in lines[FREEZE:]} == {"compressed"}
    (rate,) = {line["learning_rate"] for line in lines[STEPS:]}
    assert rate == pytest.approx(0.1 * PretrainConfig.learning_rate)
    assert json.loads((single_run / "config.json").read_text())["until"] == 2 * STEPS


@SLOW
def test_a_run_goes_on_to_more_steps_with_other_workers(single_run, capsys):
    more = STEPS + 2
    resume(single_run, "--steps", str(more), "--workers", "4", "--log-every", "2")
    assert "converted from 8 workers to 4" in capsys.readouterr().out
    lines = steps_of(single_run)
    assert [line["step"] for line in lines[STEPS:]] == [more]
    before, after = lines[STEPS - 1], lines[-1]
    assert after["stage"] == "compressed"
    # Of fewer workers, each keeps a larger share of the values at home.
    assert 0.8 < after["sent_bytes"] / before["sent_bytes"] < 1
    assert after["total_sent_bytes"] == (
        before["total_sent_bytes"] + 2 * after["sent_bytes"]
    )
    assert abs(after["loss"] - before["loss"]) < 0.5


def test_what_the_workers_or_the_text_cannot_do_is_refused(config, tmp_path):
    config = replace(config, out=tmp_path / "run")
    cudnn = replace(config, attention="cudnn", dtype="bfloat16")
    with pytest.raises(InputError, match="--attention cudnn needs NVIDIA GPUs"):
        pretrain(cudnn)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for letter in "abcdefgh":
        (corpus / f"{letter}.txt").write_text(f"word{letter}")
    with pytest.raises(InputError, match="of the corpus's training documents have two"):
        pretrain(replace(config, corpus=(corpus,)))
    for letter in "abcdef":
        (corpus / f"{letter}.txt").write_text("1 2 3 4 " * 1250 + "\n\n7")
    (corpus / "g.txt").write_text("One is one. Two is two.")
    with pytest.raises(InputError, match="the corpus makes 2 documents and"):
        pretrain(replace(config, corpus=(corpus,)))
    assert not run_folder.exists(config.out)
    run_folder.check_free(config.out)


def test_skipped_steps_are_counted_and_written(config, tmp_path, monkeypatch, capsys):
    """A step whose gradients are not finite, in a run that freezes by itself."""
    make = loop.make_optimizer

    def poisoned(*args, **kwargs):
        def update_fn(updates, state, params=None):
            del params
            bad = jax.lax.axis_index("data") == 3
            factor = jax.numpy.where(bad & (state == 1), jax.numpy.nan, 1.0)
            return jax.tree.map(lambda g: g * factor, updates), state + 1

        poison = optax.GradientTransformation(
            lambda params: jax.numpy.int32(0), update_fn
        )
        return optax.chain(poison, make(*args, **kwargs))

    monkeypatch.setattr(loop, "make_optimizer", poisoned)
    out = tmp_path / "run"
    pretrain(
        replace(config, out=out, compare=False, freeze_step="auto", eval_every=STEPS)
    )
    lines = steps_of(out)
    assert [line["skipped"] for line in lines] == [0] + [1] * (STEPS - 1)
    rates = [line["learning_rate"] for line in lines[:3]]
    assert rates[0] == rates[1] < rates[2]
    np.testing.assert_array_equal(
        [line["total_sent_bytes"] for line in lines],
        np.cumsum([line["sent_bytes"] for line in lines]),
    )
    assert not (out / "adam").exists()
    said = capsys.readouterr().out
    assert f"1 of {STEPS} steps were skipped, as their gradients" in said
    assert lines[-1]["stage"] == "compressed"
    assert "no step was compressed" not in said


def command(*flags):
    return [sys.executable, "-m", "train.pretrain", *map(str, flags)]


@SLOW
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_is_killed_goes_on_exactly(corpus, tmp_path, signal_number):
    flags = {
        "--corpus": corpus,
        "--vocab-size": 100,
        "--steps": 40,
        "--batch": 8,
        "--seq": 16,
        "--warmup-steps": 2,
        "--freeze-step": 15,
        "--checkpoint-every": 10,
        "--log-every": 1,
        "--workers": 4,
    }
    flags = [text for flag in flags.items() for text in flag]
    subprocess.run(command(*flags, "--out", tmp_path / "whole"), cwd=ROOT, check=True)
    killed = subprocess.Popen(command(*flags, "--out", tmp_path / "killed"), cwd=ROOT)
    while not (tmp_path / "killed" / "metrics.jsonl").exists() or (
        len(steps_of(tmp_path / "killed")) < 23
    ):
        time.sleep(0.02)
        assert killed.poll() is None
    killed.send_signal(signal_number)
    assert killed.wait() == -signal_number
    assert len(steps_of(tmp_path / "killed")) < 40
    subprocess.run(
        command("--resume", "--out", tmp_path / "killed"), cwd=ROOT, check=True
    )
    chex.assert_trees_all_equal(
        last_arrays(tmp_path / "killed", 40), last_arrays(tmp_path / "whole", 40)
    )
    assert without_speed(record.read(tmp_path / "killed")) == without_speed(
        record.read(tmp_path / "whole")
    )
