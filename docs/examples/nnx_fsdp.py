"""A Flax NNX model, sharded inside each host and compressed between hosts: all of it.

    onebit-launch --processes 2 --devices-per-process 4 -- nnx_fsdp.py --out FOLDER

starts two processes on one machine that stand for two hosts. It has an explicit mesh,
dropout, weight decay of matrices alone, a warm-up of 8 bits, evaluation, and
checkpoints in a folder that all hosts share. The same command goes on from the newest.
"""

import argparse
import pathlib

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--steps", type=int, default=60)
flags = parser.parse_args()

jax.distributed.initialize()  # before anything looks at a device
TOKENS, WIDTH, LENGTH, BATCH = 64, 32, 9, 32


class Model(nnx.Module):
    """Predicts the token after each; matrices are divided over `fsdp`."""

    def __init__(self, rngs):
        """Makes the layers."""
        init = nnx.with_partitioning(nnx.initializers.normal(0.3), ("fsdp", None))
        self.embedding = nnx.Embed(TOKENS, WIDTH, embedding_init=init, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(WIDTH, TOKENS, kernel_init=init, rngs=rngs)

    def __call__(self, tokens):
        """Logits."""
        table = jax.reshard(self.embedding.embedding[...], P())
        x = table.at[tokens].get(out_sharding=P("fsdp", None, None))
        return self.head(self.dropout(self.norm(x)))


def loss_of(model, tokens):
    """The mean loss of rows of tokens."""
    labels = jax.nn.one_hot(tokens[:, 1:], TOKENS)
    return optax.softmax_cross_entropy(model(tokens[:, :-1]), labels).mean()


def training_loss(params, tokens, rest, key):
    """With dropout, by a key that differs between hosts."""
    model = nnx.merge(graph, params, rest, copy=True)
    nnx.reseed(model, dropout=jax.random.fold_in(key, jax.lax.axis_index("replica")))
    return loss_of(model, tokens)


def evaluation_loss(params, tokens, rest):
    """Without dropout."""
    return loss_of(nnx.merge(evaluation_graph, params, rest), tokens)


def rows_of(step, number):
    """Rows of a step, the same in every process."""
    first = np.random.default_rng(step).integers(0, TOKENS, (number, 1))
    return ((first + 5 * np.arange(LENGTH)) % TOKENS).astype(np.int32)


hosts, devices = jax.process_count(), jax.local_device_count()
mesh = jax.make_mesh((hosts, devices), ("replica", "fsdp"))
tx = onebit_jax.onebit_adamw(
    1e-2,
    onebit_jax.sign_mean("replica"),
    onebit_jax.freeze_at(20),
    weight_decay=0.01,
    mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    warmup_exchange=onebit_jax.quantized_mean("replica", 8),
)
run = onebit_jax.data_parallel(training_loss, tx, mesh, axis="replica")

with jax.set_mesh(mesh):
    model = nnx.jit(lambda: Model(nnx.Rngs(0, dropout=1)))()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    model.eval()
    evaluation_graph, _, evaluation_rest = nnx.split(model, nnx.Param, ...)
    params, state = run.init(params)
    evaluate = jax.jit(
        jax.shard_map(
            evaluation_loss,
            mesh=mesh,
            in_specs=(P(), P(), P()),
            out_specs=P(),
            axis_names={"replica"},
        )
    )

    manager, first = None, 0
    if flags.out:
        # Not asynchronous, as the next step takes the memory of what is saved.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False
        )
        manager = ocp.CheckpointManager(flags.out.absolute(), options=options)
        first = manager.latest_step() or 0
    if manager and first:
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            params,
        )
        state = onebit_jax.abstract_state(tx, shapes, mesh)
        saved = {"params": shapes, "state": state}
        restored = manager.restore(first, args=ocp.args.StandardRestore(saved))
        params, state = restored["params"], restored["state"]

    of_all, of_each = (
        NamedSharding(mesh, P(axes, None)) for axes in (("replica", "fsdp"), "fsdp")
    )
    for step in range(first, flags.steps):
        own = np.split(rows_of(step, BATCH), hosts)[jax.process_index()]
        batch = jax.make_array_from_process_local_data(of_all, own)
        key = jax.random.key(step)
        params, state, loss = run.step(params, state, batch, rest, key)
        loss.block_until_ready()  # on virtual devices: wait, or they may hang
        if (step + 1) % 20 and step + 1 < flags.steps:
            continue
        # Every host evaluates the same rows, and sends nothing.
        held_out = jax.make_array_from_process_local_data(of_each, rows_of(9999, BATCH))
        held_out_loss = evaluate(params, held_out, evaluation_rest)
        if manager:
            saved = ocp.args.StandardSave({"params": params, "state": state})
            manager.save(step + 1, args=saved)
        if jax.process_index() == 0:
            print(f"step {step + 1}, loss {loss:.4f}, held out {held_out_loss:.4f}")

    onebit_jax.assert_replicas_identical(params, mesh)
