"""The examples run, and do what they say."""

import re
import runpy
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from test_readme import ROOT, printed_by

from models import SIZES, BertForPreTraining
from train.data.model_folder import write_model
from train.data.vocabulary import CLS, SEP, SPECIAL, tokenizer_of

EXAMPLES = ROOT / "docs" / "examples"
LOSSES = """
import runpy, sys
import jax
example = runpy.run_path(sys.argv[1])
for step in range(2):
    losses = jax.jit(jax.vmap(
        lambda _: example["loss_fn"](
            example["params"],
            example["batch_of"](0),
            example["statistics"],
            jax.random.key(step),
        )[0],
        axis_name="data",
        axis_size=8,
    ))(jax.numpy.arange(8))
    print(*losses)
"""
SCALES = """
import runpy, sys
import jax
example = runpy.run_path(sys.argv[1])

def update(*scales):
    params, state = jax.tree.map(
        jax.numpy.copy, (example["params"], example["state"])
    )
    for step, scale in enumerate(scales):
        params, state, *_ = example["run"].step(
            params, state, example["batch_of"](step), scale, scale=scale
        )
    return jax.tree.map(lambda new, old: new - old, params, example["params"])

one, two = jax.numpy.float32([2**14, 2**12])
norm = example["optax"].tree.norm
same, different = update(one, one, one), update(one, two, one)
difference = norm(jax.tree.map(jax.numpy.subtract, same, different))
print(f"{difference / norm(same):.4f}")
"""
LAUNCHER = ["-m", "onebit_launch", "--processes", "2"]


def lines_of(name, *launcher, arguments=()):
    """The lines that an example prints, alone or under the launcher."""
    return printed_by(*launcher, EXAMPLES / name, *arguments).splitlines()


def numbers_in(line):
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", line)]


def last_numbers(lines, pattern):
    """Those of the one line of process 0, or of a program alone, of a pattern."""
    (line,) = [x for x in lines if re.match(rf"(\[0\] )?{pattern}", x)]
    return numbers_in(line.removeprefix("[0] "))


def test_a_step_of_your_own():
    *lines, last = lines_of("plain_jax.py")
    _, accuracy, clipped = numbers_in(last)
    assert accuracy > 0.9, "a quarter by chance"
    assert 0 < clipped < 50
    warmup, compressed = (
        last_numbers(lines, rf"a device sends .*\({stage}\)")[0]
        for stage in ("warmup", "compressed")
    )
    assert warmup > 20 * compressed


@pytest.mark.slow
def test_an_nnx_model_with_its_statistics_and_random_numbers():
    lines = lines_of("nnx_batch_norm.py", "-c", LOSSES)
    _, accuracy, mean = last_numbers(lines, "loss")
    assert accuracy > 0.8, "a quarter by chance"
    assert mean > 0, "the statistics were learnt, too"
    assert last_numbers(lines, "steps skipped") == [1], "by what is not a number"
    losses = " ".join(lines[-2:]).split()
    assert len(set(losses)) == 16, "of one batch, by eight workers in two steps"


@pytest.mark.slow
def test_an_equinox_model():
    *_, last = lines_of("equinox_model.py")
    _, accuracy, compressed = numbers_in(last)
    assert accuracy > 0.85, "a quarter by chance"
    assert compressed


@pytest.mark.slow
def test_float16_with_a_loss_scale():
    first, warmup, _, compressed = map(numbers_in, lines_of("loss_scaling.py"))
    loss, skipped, scale = first
    assert loss < 0.5, "1.4 by chance"
    (difference,) = numbers_in(lines_of("loss_scaling.py", "-c", SCALES)[-1])
    assert difference < 0.02, "an update does not know its micro-batches' scales"
    assert 0 < skipped < 20, "the scale was too large at first, and no longer"
    assert scale < 2**24
    assert warmup[0] > 20 * compressed[0]


def test_a_checkpoint_of_eight_workers_is_gone_on_with_by_four():
    before, saved, restored, after = map(numbers_in, lines_of("orbax_resizing.py"))
    assert saved == restored
    assert min(saved) > 0.01, "there are errors to be kept"
    assert before[:2] == [8, 60]
    assert after[:2] == [4, 120]
    assert after[2] < before[2] / 10


@pytest.mark.slow
def test_several_processes_go_on_from_their_checkpoint(tmp_path):
    whole = lines_of_two("--steps", "70", "--out", tmp_path)
    assert [numbers_in(x)[1] for x in whole[:4]] == [20, 40, 60, 70]
    shutil.rmtree(tmp_path / "70")
    gone_on = lines_of_two("--steps", "70", "--out", tmp_path)
    assert gone_on == whole[3:], "step 70, and the processes"
    assert last_numbers(gone_on, "step 70")[1] < 0.1, "from 0.64"
    assert last_numbers(gone_on, "2 processes") == [2, 2]


@pytest.mark.slow
def test_an_nnx_model_of_two_hosts_goes_on_from_its_checkpoint(tmp_path):
    settings = "--devices-per-process", "4"
    whole = lines_of_two("--out", tmp_path, program="nnx_fsdp.py", settings=settings)
    loss, held_out = last_numbers(whole, "step 60")[1:]
    assert held_out < loss < 0.1, "4.2 by chance; without dropout it is lower"
    shutil.rmtree(tmp_path / "60")
    gone_on = lines_of_two("--out", tmp_path, program="nnx_fsdp.py", settings=settings)
    assert gone_on == whole[-1:]


def lines_of_two(*arguments, program="several_processes.py", settings=()):
    flags = (*LAUNCHER, *settings, "--")
    lines = lines_of(program, *flags, arguments=arguments)
    return [x for x in lines if "step" in x or "processes" in x]


@pytest.mark.slow
def test_two_hosts_go_on_from_their_checkpoint(tmp_path):
    def lines_of_hosts(hosts):
        flags = "--processes", hosts, "--devices-per-process", "4", "--"
        lines = lines_of(
            "two_hosts.py", "-m", "onebit_launch", *flags, arguments=("--out", tmp_path)
        )
        return [x for x in lines if "Gloo" not in x]

    whole = lines_of_hosts("2")
    assert last_numbers(whole, "2 hosts") == [2, 4]
    assert last_numbers(whole, "update 60")[1] < 0.3, "from 6.1"
    values = 512 * 128
    (compressed,) = last_numbers(whole, "compressed: ")
    assert values / 8 <= compressed < 1.2 * values / 8
    (warmup,) = last_numbers(whole, "warmup: ")
    assert values <= warmup < 1.1 * values, "8 bits a value"
    shutil.rmtree(tmp_path / "60")
    assert lines_of_hosts("2") == whole[-5:], "update 60, the hosts, their bytes"
    shutil.rmtree(tmp_path / "60")
    three = lines_of_hosts("3")
    assert last_numbers(three, "3 hosts") == [3, 4]
    assert last_numbers(three, "update 60")[1] < 0.3


@pytest.mark.slow
def test_sentences_are_embedded_with_pretrained_weights(tmp_path):
    """As each is by itself, without padding."""
    letters = "abcdefghijklmnopqrstuvwxyz.,"
    vocabulary = (*SPECIAL, *letters, *(f"##{letter}" for letter in letters), "it")
    config = replace(SIZES["tiny"], vocab_size=len(vocabulary), initializer_range=0.5)
    model = BertForPreTraining(config, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    write_model(tmp_path, config, params, "BertForPreTraining", vocabulary, cased=False)
    shape, *rows = printed_by(
        EXAMPLES / "embed_sentences.py", tmp_path / "model"
    ).splitlines()
    assert shape == "(3, 128)"
    cosines = [[float(x) for x in row.strip(" []").split()] for row in rows]
    embedded = []
    for text in ("A list is a sequence.", "A tuple is a sequence, too.", "It rains."):
        ids = tokenizer_of(vocabulary).encode(text).ids
        tokens = np.array([[SPECIAL.index(CLS), *ids, SPECIAL.index(SEP)]])
        mean = model.bert(tokens, 0 * tokens, np.array([tokens.size])).hidden[0].mean(0)
        embedded.append(mean / np.linalg.norm(mean))
    expected = np.stack(embedded) @ np.stack(embedded).T
    np.testing.assert_allclose(cosines, expected, atol=1e-3)
    assert expected.min() < 0.9


@pytest.mark.parametrize(
    "name",
    [
        "fsdp_inside",
        "nnx_explicit",
        "train_state_step",
        pytest.param("equinox_accumulation", marks=pytest.mark.slow),
        "nnx_step",
        pytest.param("pmap_step", marks=pytest.mark.slow),
    ],
)
def test_a_converted_step_learns_as_the_plain_one(name):
    """Equal as long as it sends all, and nearly so once it sends a bit a value."""
    # As users have it: Optax's Adam is not of strict types.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        made = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    before, after = made["before"], made["after"]
    np.testing.assert_allclose(after[:10], before[:10], rtol=1e-4)
    assert after[-1] < 0.8 * after[0]
    np.testing.assert_allclose(after[11:], before[11:], rtol=0.1)
    assert after[11:] != before[11:], "it is compressed"


def test_an_exchange_of_your_own():
    assert float(printed_by(EXAMPLES / "ternary_exchange.py").split()[0]) > 19


def test_an_optimizer_of_your_own():
    *_, warmup, compressed, end = printed_by(EXAMPLES / "signum.py").splitlines()
    assert "(warmup)" in warmup
    assert "(compressed)" in compressed
    loss, _, steps = end.partition(" ")
    assert float(loss) < 1
    assert "'warmup': Array(10" in steps
    assert "'compressed': Array(140" in steps


def test_a_task_of_your_own():
    *_, last = printed_by(EXAMPLES / "matrix_task.py").splitlines()
    assert "'step': 40, 'eval_loss'" in last


def test_every_example_is_on_a_page():
    pages = "".join(p.read_text("utf-8") for p in EXAMPLES.parent.rglob("*.md"))
    shown = re.findall(r"^```{literalinclude} (?:examples/)?(\w+\.py)$", pages, re.M)
    assert set(shown) == {path.name for path in EXAMPLES.glob("*.py")}
