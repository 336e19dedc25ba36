"""BERT computes what Hugging Face's PyTorch BERT computes, from the same files.

A golden model is NAME_expected.npz (inputs, sizes, results) with its weights in
NAME_pretraining.safetensors and NAME_qa.safetensors; sizes are read from the file.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import (
    BertForPreTraining,
    BertForQuestionAnswering,
    PreTrainingBatch,
    SpanBatch,
    huggingface,
    pretraining_losses,
    span_loss,
    stack_layers,
)
from models.huggingface import config_of
from models.huggingface_names import tensors_of

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def golden(hf_bert_file):
    return dict(np.load(hf_bert_file))


@pytest.fixture
def config(golden):
    return config_of(json.loads(str(golden["config"])))


def weights_of(hf_bert_file, task):
    name = hf_bert_file.name.replace("_expected.npz", f"_{task}.safetensors")
    return huggingface.read_tensors(hf_bert_file.with_name(name))


def inputs(golden):
    """Word pieces, token types and lengths."""
    mask = golden["attention_mask"]
    lengths = mask.sum(axis=1)
    # What this model is told of the padding.
    np.testing.assert_array_equal(mask, np.arange(mask.shape[1]) < lengths[:, None])
    return [
        jnp.asarray(x, jnp.int32)
        for x in (golden["input_ids"], golden["token_type_ids"], lengths)
    ]


def pretraining_batch(golden):
    """The golden inputs; as many places as the sequence with most labels has."""
    is_label = golden["labels"] != -100
    places = int(is_label.sum(axis=1).max())
    # Stable, so that a sequence's labels come first and in order.
    positions = np.argsort(~is_label, axis=1, kind="stable")[:, :places]
    weights = np.take_along_axis(is_label, positions, axis=1)
    labels = np.take_along_axis(golden["labels"], positions, axis=1)
    return PreTrainingBatch(
        *inputs(golden),
        masked_positions=jnp.asarray(positions, jnp.int32),
        masked_labels=jnp.asarray(np.where(weights, labels, 0), jnp.int32),
        masked_weights=jnp.asarray(weights, jnp.float32),
        next_sentence_labels=jnp.asarray(golden["next_sentence_label"], jnp.int32),
    )


def comparable_rows(golden, rows):
    """Every word piece, but for a padding that is inside a sequence.

    Hugging Face's embedding passes its lookups' gradients to no such row, the original
    BERT's and this one to every row.
    """
    pad = json.loads(str(golden["config"])).get("pad_token_id", 0)
    is_inside = np.any(golden["input_ids"][golden["attention_mask"] == 1] == pad)
    return np.flatnonzero((np.arange(rows) != pad) | ~is_inside)


def span_batch(golden):
    return SpanBatch(
        *inputs(golden),
        starts=jnp.asarray(golden["qa_start_positions"], jnp.int32),
        ends=jnp.asarray(golden["qa_end_positions"], jnp.int32),
    )


def graph_of(model, config):
    abstract = nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0)))
    return nnx.graphdef(abstract)


def with_arrays(params):
    return jax.tree.map(jnp.asarray, params)


@pytest.fixture(params=[("graph", False), ("tree", True)], ids=str)
def form(request):
    """NNX's mode, and whether the layers are a loop."""
    mode, scan = request.param
    with nnx.set_graph_mode(mode == "graph"):
        yield scan


class TestPreTraining:
    @pytest.fixture
    def config(self, config, form):
        return dataclasses.replace(config, scan=form)

    @pytest.fixture
    def graph(self, config):
        return graph_of(BertForPreTraining, config)

    @pytest.fixture
    def params(self, config, hf_bert_file):
        tensors = weights_of(hf_bert_file, "pretraining")
        return with_arrays(huggingface.to_params(tensors, config, "BertForPreTraining"))

    def test_logits_and_hidden_states(self, golden, graph, params):
        batch = pretraining_batch(golden)
        everywhere = jnp.broadcast_to(
            jnp.arange(batch.token_ids.shape[1]), batch.token_ids.shape
        )
        batch = batch._replace(masked_positions=everywhere)

        @jax.jit
        def forward(params):
            model = nnx.merge(graph, params)
            hidden, _ = model.bert(batch.token_ids, batch.token_types, batch.lengths)
            return hidden, *model(batch)

        for name, ours in zip(
            ("last_hidden_state", "prediction_logits", "seq_relationship_logits"),
            forward(params),
            strict=True,
        ):
            np.testing.assert_allclose(ours, golden[name], err_msg=name, **TOLERANCE)

    def test_loss_and_gradients(self, golden, config, graph, params):
        batch = pretraining_batch(golden)

        def loss_fn(params):
            model = nnx.merge(graph, params)
            return sum(pretraining_losses(*model(batch), batch))

        loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params)
        np.testing.assert_allclose(loss, golden["loss"], **TOLERANCE)
        ours = tensors_of(grads, config, "BertForPreTraining")
        theirs = {
            name.removeprefix("grad:"): value
            for name, value in golden.items()
            if name.startswith("grad:")
        }
        assert theirs
        for name, expected in theirs.items():
            found = ours[name]
            if name == "bert.embeddings.word_embeddings.weight":
                rows = comparable_rows(golden, len(expected))
                found, expected = found[rows], expected[rows]
            np.testing.assert_allclose(found, expected, err_msg=name, **TOLERANCE)


def test_question_answering(golden, config, form, hf_bert_file):
    config = dataclasses.replace(config, scan=form)
    tensors = weights_of(hf_bert_file, "qa")
    params = huggingface.to_params(tensors, config, "BertForQuestionAnswering")
    batch = span_batch(golden)
    graph = graph_of(BertForQuestionAnswering, config)

    @jax.jit
    def forward(params):
        model = nnx.merge(graph, params)
        starts, ends = model(batch.token_ids, batch.token_types, batch.lengths)
        return starts, ends, span_loss(starts, ends, batch)

    for name, ours in zip(
        ("qa_start_logits", "qa_end_logits", "qa_loss"),
        forward(with_arrays(params)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, golden[name], err_msg=name, **TOLERANCE)


TASKS = {"pretraining": "BertForPreTraining", "qa": "BertForQuestionAnswering"}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("scan", [False, True])
def test_weights_survive_the_round_trip_bit_by_bit(
    config, hf_bert_file, task, scan, tmp_path
):
    theirs = weights_of(hf_bert_file, task)
    scanned = dataclasses.replace(config, scan=scan)
    params = huggingface.to_params(theirs, scanned, TASKS[task])
    huggingface.write(tmp_path, scanned, params, TASKS[task])
    ours = huggingface.read_tensors(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert ours[name].shape == value.shape
        assert ours[name].tobytes() == value.tobytes(), name
    again, own = huggingface.read(tmp_path, TASKS[task])
    assert again == config
    own = stack_layers(own) if scan else own
    jax.tree.map(np.testing.assert_array_equal, own, params)


def test_written_configuration_is_the_one_read(golden, config, hf_bert_file, tmp_path):
    tensors = weights_of(hf_bert_file, "qa")
    params = huggingface.to_params(tensors, config, "BertForQuestionAnswering")
    huggingface.write(tmp_path, config, params, "BertForQuestionAnswering")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["BertForQuestionAnswering"]
    theirs = json.loads(str(golden["config"]))
    both = written.keys() & theirs.keys()
    assert {"hidden_size", "num_hidden_layers", "vocab_size"} <= both
    assert {key: written[key] for key in both} == {key: theirs[key] for key in both}
