"""A Flax NNX model, sharded on an explicit mesh, compressed between its replicas.

The `fsdp` axis of 8 devices is split into `replica` (2) and `fsdp` (4). The model stays
as it is: it names `fsdp` alone.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax

jax.config.update("jax_num_cpu_devices", 8)  # virtual devices; not on real ones
TOKENS, WIDTH = 64, 32


class Model(nnx.Module):
    """Predicts the token after each."""

    def __init__(self, rngs):
        """Divides both matrices over `fsdp`."""
        init = nnx.with_partitioning(nnx.initializers.normal(0.3), ("fsdp", None))
        self.embedding = nnx.Embed(TOKENS, WIDTH, embedding_init=init, rngs=rngs)
        self.head = nnx.Linear(
            WIDTH, TOKENS, use_bias=False, kernel_init=init, rngs=rngs
        )

    def __call__(self, tokens):
        """Logits. Weights are gathered where they are used."""
        embedding, kernel = (
            jax.reshard(p[...], P())
            for p in (self.embedding.embedding, self.head.kernel)
        )
        x = embedding.at[tokens].get(out_sharding=P("fsdp", None, None))
        return jnp.tanh(x) @ kernel


def loss_fn(params, tokens, rest):
    """The loss of a batch of (examples, time), by parameters and the model's rest."""
    logits = nnx.merge(graph, params, rest, copy=True)(tokens[:, :-1])
    labels = jax.nn.one_hot(tokens[:, 1:], TOKENS)
    return optax.softmax_cross_entropy(logits, labels).mean()


def batches(axes):
    """Twenty batches, their examples divided over these axes of the mesh."""
    for i in range(20):
        first = jax.random.randint(jax.random.key(i), (32, 1), 0, TOKENS)
        tokens = (first + 5 * jnp.arange(9)) % TOKENS
        yield jax.device_put(
            tokens, NamedSharding(jax.sharding.get_mesh(), P(axes, None))
        )


# Before: jit, one axis.
adam = optax.adam(1e-2)


@jax.jit
def step(params, state, tokens, rest):
    """New parameters, new state, and the loss."""
    loss, gradients = jax.value_and_grad(loss_fn)(params, tokens, rest)
    updates, state = adam.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


before = []
with jax.set_mesh(jax.make_mesh((8,), ("fsdp",))):
    model = nnx.jit(lambda: Model(nnx.Rngs(0)))()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    state = adam.init(params)
    for tokens in batches("fsdp"):
        params, state, loss = step(params, state, tokens, rest)
        before.append(float(loss))

# After: the same model and loss, and the axis split.
tx = onebit_jax.onebit_adam(
    1e-2, onebit_jax.sign_mean("replica"), onebit_jax.freeze_at(10)
)
mesh = jax.make_mesh((2, 4), ("replica", "fsdp"))
after = []
with jax.set_mesh(mesh):
    model = nnx.jit(lambda: Model(nnx.Rngs(0)))()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    run = onebit_jax.data_parallel(loss_fn, tx, mesh, axis="replica")
    params, state = run.init(params)
    for tokens in batches(("replica", "fsdp")):
        params, state, loss = run.step(params, state, tokens, rest)
        after.append(float(loss))

print(f"loss {before[-1]:.4f} before, {after[-1]:.4f} after")
print(params["head"]["kernel"][...].sharding)
