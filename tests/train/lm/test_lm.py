"""The language model's text, its runs, and that they go on exactly."""

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launching import arrays_of
from runs import PROMOTION, steps_of, without_speed, write_corpus
from tokenizers import Tokenizer, models, pre_tokenizers

from models import Decoder, DecoderConfig
from train.core import metrics_log, picture, run_folder
from train.core.batches import element
from train.core.errors import InputError
from train.core.objective import init_params
from train.data.corpus import read_corpus
from train.lm import command, task
from train.lm.config import LmConfig
from train.lm.data import (
    BYTES,
    TOKENIZER_FILE,
    Windows,
    keep_tokenizer,
    load,
    read_coding,
)
from train.lm.task import evaluation_loss, training_loss

SMALL = DecoderConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24)
STEPS, FREEZE = 6, 3
WORDS = ["sun", "moon", "star", "river", "stone", "tree", "cloud", "wind", "rain"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def config(corpus, tmp_path):
    return LmConfig(
        corpus=(corpus,),
        steps=STEPS,
        freeze_step=FREEZE,
        batch=4,
        seq=16,
        workers=2,
        eval_every=4,
        eval_sequences=8,
        checkpoint_every=2,
        log_every=1,
        out=tmp_path / "run",
    )


def train(config):
    with PROMOTION, mock.patch.object(task, "DECODER_SIZES", {"nano": SMALL}):
        command.train_lm(config)


def write_tokenizer(path):
    """A tokenizer of words, whose file would cut texts short and pad them."""
    pieces = ["?", "[EOS]", *WORDS, *(word.capitalize() for word in WORDS), "."]
    ids = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(path))
    return path


def test_windows_are_disjoint_and_predict_each_token_once():
    windows = Windows(np.arange(23, dtype=np.uint8), 5)
    rows = np.stack([windows[i] for i in range(len(windows))])
    np.testing.assert_array_equal(rows[:, :-1].ravel(), np.arange(20))
    np.testing.assert_array_equal(rows[:, 1:].ravel(), np.arange(1, 21))
    assert rows.dtype == np.int32
    assert [len(Windows(np.zeros(n), 5)) for n in (0, 5, 6, 10, 11)] == [0, 0, 1, 1, 2]


def test_text_is_kept_byte_by_byte_and_held_out_documents_apart(config):
    corpus = config.corpus[0]
    documents = [" ".join(document).encode() for document in read_corpus([corpus])]
    load(config)
    parts = {
        part: np.load(next(config.out.glob(f"tokens/*/{part}/pieces.npy")))
        for part in ("training", "held_out")
    }
    texts = {}
    for part, tokens in parts.items():
        assert tokens.dtype == np.uint8
        *texts[part], rest = tokens.tobytes().split(bytes([BYTES.end]))
        assert rest == b""
    assert len(texts["held_out"]) == 2
    assert sorted([*texts["training"], *texts["held_out"]]) == sorted(documents)
    # Kept once, for all lengths.
    before = list(config.out.rglob("pieces.npy"))
    load(replace(config, seq=24))
    assert list(config.out.rglob("pieces.npy")) == before


def test_a_tokenizers_file_neither_cuts_nor_pads_nor_adds(tmp_path):
    coding = read_coding(write_tokenizer(tmp_path / "words.json"))
    ids = coding.encode("Sun moon star river stone tree nothing.")
    pieces = ["?", "[EOS]", *WORDS, *(word.capitalize() for word in WORDS), "."]
    expected = [pieces.index(word) for word in ["Sun", *WORDS[1:6], "?", "."]]
    np.testing.assert_array_equal(ids, expected)
    assert (coding.end, coding.vocab_size) == (len(pieces), len(pieces) + 1)
    assert coding.unknown == 0


def test_a_run_keeps_its_tokenizer_and_a_new_one_writes_its_own(tmp_path):
    """Not the one that a run has left that was killed before it began."""
    coding = read_coding(write_tokenizer(tmp_path / "words.json"))
    kept = tmp_path / TOKENIZER_FILE
    for there, goes_on, is_kept in (
        ("{", False, False),
        ("{", True, True),
        (None, True, False),
    ):
        kept.unlink(missing_ok=True)
        if there:
            kept.write_text(there)
        keep_tokenizer(coding, tmp_path, goes_on=goes_on)
        assert (kept.read_text() == there) == is_kept
        assert (kept.read_text() == coding.file) != is_kept


def test_any_workers_and_micro_batches_have_the_gradient_of_the_whole():
    config = replace(SMALL, dropout=0.2)
    params = init_params(partial(Decoder, config), 0)
    windows = np.random.default_rng(0).integers(0, 256, (6, 9), dtype=np.int32)
    step = jnp.int32(3)

    def gradient(workers, accumulate):
        loss_fn = training_loss(config, 0, "data", accumulate)
        one = jax.value_and_grad(lambda params, share: loss_fn(params, share, step))
        shares = windows.reshape(workers, -1, windows.shape[1])
        each = jax.jit(jax.vmap(one, (None, 0), axis_name="data"))(params, shares)
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), each)

    whole = gradient(1, 1)
    chex.assert_trees_all_close(gradient(2, 3), whole, atol=1e-6)
    without = jax.jit(evaluation_loss(config))(params, windows)
    assert 1e-4 < abs(whole[0] - without) < 0.1


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_by_bit_with_its_own_tokenizer(
    config, tmp_path, monkeypatch
):
    """SIGKILL leaves on the disk what is there at the time, and no more."""
    file = write_tokenizer(tmp_path / "words.json")
    config = replace(config, tokenizer=file, dropout=0.1, tied=False)
    killed, append = tmp_path / "killed", metrics_log.append
    drawn, draw = [], picture.draw

    def append_and_copy(folder, metrics):
        append(folder, metrics)
        if folder == config.out and metrics.step == STEPS - 1:
            shutil.copytree(config.out, killed)

    with monkeypatch.context() as patch:
        patch.setattr(metrics_log, "append", append_and_copy)
        patch.setattr(picture, "draw", lambda *x: drawn.append(x[0]) or draw(*x))
        train(config)
    assert drawn == [config.out / "training.png"]
    names = "config.json checkpoints metrics.jsonl training.png tokens tokenizer.json"
    assert {path.name for path in config.out.iterdir()} == set(names.split())
    lines = steps_of(config.out)
    stages = [line["stage"] for line in lines]
    assert stages == ["warmup"] * FREEZE + ["compressed"] * (STEPS - FREEZE)

    file.unlink()
    shutil.rmtree(killed / "tokens")
    assert len(steps_of(killed)) == STEPS - 1
    train(command.parse(["--resume", "--out", str(killed)]).training)
    ours, theirs = (arrays_of(folder, STEPS) for folder in (killed, config.out))
    assert ours.keys() == theirs.keys()
    assert not [k for k in ours if ours[k].tobytes() != theirs[k].tobytes()]
    assert any("small_error" in k and ours[k].any() for k in ours)
    logs = [without_speed(metrics_log.read(folder)) for folder in (killed, config.out)]
    assert logs[0] == logs[1]

    assert [line["step"] for line in logs[0] if "eval_loss" in line] == [4, STEPS]
    kept = run_folder.read(killed, command.MODULE, LmConfig)
    expected = held_out_loss(kept, ours)
    assert logs[0][-1]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    tokenizer = killed / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("rain", "hail"))
    with pytest.raises(InputError, match="the tokenizer is not the one that the run"):
        load(kept.flags, kept)


def held_out_loss(run, arrays):
    """The loss of a checkpoint's parameters, without dropout."""
    _, data = load(run.flags, run)
    config = replace(SMALL, vocab_size=data.coding.vocab_size, tied=False)
    first = init_params(partial(Decoder, config), 0)
    params = jax.tree_util.tree_map_with_path(
        lambda path, _: arrays[by_path_name(path)], first
    )
    loss_of = jax.jit(evaluation_loss(config))
    losses = [loss_of(params, element(data.held_out, i)) for i in (0, 1)]
    return np.mean(losses)  # of 8 sequences


def by_path_name(path):
    return "params." + jax.tree_util.keystr(path, simple=True, separator=".")


def test_comparing_closes_with_plain_adam_and_local_steps(config, capsys):
    """Each in a folder of its own, on the same samples; drawn together."""
    flags = {"freeze_step": None, "warmup_steps": 1, "steps": 2, "compare": True}
    train(replace(config, optimizer="distributed_lion", **flags))
    said = capsys.readouterr().out
    for name in ("distributed_lion", "local"):
        assert re.search(rf"^{name} ends \S+ % \w+ adam, and each worker", said, re.M)
    local = run_folder.read(config.out / "local", command.MODULE, LmConfig).flags
    assert (local.inner, local.freeze_step, local.compare) == ("muon", None, False)
    adam = steps_of(config.out / "adam")
    steps = steps_of(config.out / "local")
    assert [line["stage"] for line in steps] == ["local", "sync"]
    assert steps[0]["loss"] == pytest.approx(adam[0]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq": 4000}, "training text makes 1 sequences of 4000 tokens, and 4 at"),
        ({"seq": 2500, "batch": 2}, "the corpus's held-out text makes 0 sequences"),
        ({"attention": "cudnn"}, "computes in bfloat16 or float16, not float32"),
        ({"tokenizer": Path(__file__)}, "cannot be read as one of Hugging Face's"),
        ({"topology": "hierarchical"}, "there is one process; start one on each of"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(config, changes, message):
    with pytest.raises(InputError) as caught:
        train(replace(config, **changes))
    assert message in str(caught.value)
    assert not run_folder.exists(config.out)
