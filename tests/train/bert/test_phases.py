"""Two phases, of short sequences and of long ones, are one run."""

import shutil
from dataclasses import replace

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from runs import PROMOTION, resume, small_config, steps_of, write_corpus

from models import SIZES
from train.bert.config import check_resumable
from train.bert.pretrain import pretrain
from train.core import loop, program
from train.core import metrics_log as record
from train.core.errors import InputError

SHORT, LONG = 16, 32
PHASE = 4  # steps, of each phase
RATE = 1e-3
# The newest checkpoint before each is at the end of the first phase, in the second.
KILLED_AFTER = {"boundary": 5, "second": 7}
BYTES_HELD = {}
"""By all arrays, after each step of the run that was not interrupted."""
MODEL = replace(
    SIZES["tiny"],
    hidden_size=32,
    num_layers=1,
    intermediate_size=64,
    max_positions=LONG,
)


@pytest.fixture(scope="module", autouse=True)
def _small(tmp_path_factory):
    shared = tmp_path_factory.getbasetemp().parent / "compiled"
    before = jax.config.jax_compilation_cache_dir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "EVAL_SEQUENCES", 8)
        patch.setattr(loop, "SIZES", {"tiny": MODEL})
        jax.config.update("jax_compilation_cache_dir", str(shared))
        yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return replace(
        small_config(write_corpus(tmp_path_factory.mktemp("corpus"))),
        compare=False,
        workers=2,
        seq=SHORT,
        steps=PHASE,
        warmup_steps=1,
        freeze_step=2,
        learning_rate=RATE,
        weight_decay=0.0,
        long_seq=LONG,
        long_steps=PHASE,
        long_batch=4,
        long_accumulate=2,
        long_warmup_steps=2,
        long_freeze_step=3,
        whole_words=True,
        dtype="bfloat16",
        pre_norm=True,
        remat="layer",
    )


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory, _small):
    """A run that was not interrupted, and copies of it as a kill would leave it."""
    base = tmp_path_factory.mktemp("runs")
    out, append = base / "run", loop.record.append

    def append_and_copy(folder, metrics):
        append(folder, metrics)
        held = sum(x.nbytes for x in jax.live_arrays())
        BYTES_HELD.setdefault(metrics.step, held)
        for name, step in KILLED_AFTER.items():
            if metrics.step == step:
                shutil.copytree(out, base / name)

    with pytest.MonkeyPatch.context() as patch, PROMOTION:
        patch.setattr(loop.record, "append", append_and_copy)
        pretrain(replace(config, out=out))
    return out


def arrays(folder, step):
    with (
        ocp.PyTreeCheckpointer() as checkpointer,
        pytest.warns(UserWarning, match="Sharding info not provided"),
    ):
        return checkpointer.restore(folder / "checkpoints" / str(step) / "arrays")


def without_speed(lines):
    return [{n: v for n, v in x.items() if n != "examples_per_second"} for x in lines]


@pytest.mark.slow
def test_each_phase_has_its_own_warm_up_and_freeze(finished):
    lines = steps_of(finished)
    assert [line["step"] for line in lines] == list(range(1, 2 * PHASE + 1))
    stages = ["warmup"] * 2 + ["compressed"] * 2 + ["warmup"] * 3 + ["compressed"]
    assert [line["stage"] for line in lines] == stages
    rates = [line["learning_rate"] / RATE for line in lines]
    assert rates[:2] == pytest.approx([1, 1])
    assert rates[PHASE : PHASE + 3] == pytest.approx([0.5, 1, 1])
    assert rates[3] == pytest.approx(0.4)
    np.testing.assert_array_equal(
        [line["total_sent_bytes"] for line in lines],
        np.cumsum([line["sent_bytes"] for line in lines]),
    )
    # The loss of the first step with long sequences is one of a model that has learnt.
    assert abs(lines[PHASE]["loss"] - lines[PHASE - 1]["loss"]) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILLED_AFTER)
def test_a_run_killed_between_phases_or_in_the_second_goes_on_bit_by_bit(
    finished, tmp_path, moment
):
    folder = shutil.copytree(finished.parent / moment, tmp_path / "run")
    assert steps_of(folder)[-1]["step"] == KILLED_AFTER[moment]
    resume(folder)
    chex.assert_trees_all_equal(arrays(folder, 2 * PHASE), arrays(finished, 2 * PHASE))
    assert without_speed(record.read(folder)) == without_speed(record.read(finished))


@pytest.mark.slow
def test_the_second_phase_holds_nothing_of_the_first(finished):
    params = arrays(finished, 2 * PHASE)["params"]
    own = sum(x.nbytes for x in jax.tree.leaves(params))
    assert BYTES_HELD[2 * PHASE - 1] < BYTES_HELD[PHASE - 1] + own


@pytest.mark.slow
def test_positions_that_wait_for_the_second_phase_need_no_mask(finished):
    def rows(folder, step):
        params = arrays(folder, step)["params"]
        chex.assert_tree_all_finite(params)
        return params["bert"]["embeddings"]["position"]["embedding"][SHORT:]

    first = finished.parent / "boundary"
    frozen, before, after = (
        rows(first, 2),
        rows(first, PHASE),
        rows(finished, 2 * PHASE),
    )
    # No coordinate moves by more than 3 learning rates a step.
    assert np.abs(before - frozen).max() <= 2 * 3 * RATE
    moved = np.abs(after - before)
    assert np.mean(moved > RATE / 10) > 0.9
    assert moved.max() <= PHASE * 3 * RATE


@pytest.mark.slow
def test_a_finished_run_goes_on_in_its_last_phase(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    resume(folder, "--long-steps", str(PHASE + 1))
    last = steps_of(folder)[-1]
    assert (last["step"], last["stage"]) == (2 * PHASE + 1, "compressed")
    assert last["learning_rate"] == pytest.approx(0.1 * RATE)


def test_the_first_phase_of_a_run_stays_as_long_as_it_was(config):
    with pytest.raises(InputError, match="was started with --steps 4, not 5"):
        check_resumable(config, replace(config, steps=5))
    check_resumable(config, replace(config, long_steps=5))
    with pytest.raises(InputError, match="was started with --long-seq 32, not 64"):
        check_resumable(config, replace(config, long_seq=64))
