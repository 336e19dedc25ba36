"""Float16 with a dynamic loss scale, as DeepSpeed's `"fp16": {"loss_scale": 0}`.

The parameters stay float32 and are cast where the loss is computed. The loss is
multiplied by the scale and each worker's gradients are divided by it, before those of
several micro-batches are added, clipped and exchanged. A micro-batch whose gradients
overflow on any worker is skipped on all, and the scale is halved.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

import onebit_jax

jax.config.update("jax_num_cpu_devices", 4)  # virtual workers; not on real devices

# As DeepSpeed's settings of these names, but with a larger power than its 16, so that
# the first steps overflow: a few skipped steps at the start are normal.
INITIAL_SCALE_POWER, LOSS_SCALE_WINDOW, MIN_LOSS_SCALE = 24, 50, 1.0
MICRO_BATCHES = 2  # of an update: "gradient_accumulation_steps"


def unscale():
    """Gradients divided by the scale, which `run.step` is given by name."""

    def update(gradients, state, params=None, *, scale, **extra):
        return jax.tree.map(lambda g: g / scale, gradients), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
adamw = onebit_jax.onebit_adamw(
    3e-3, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(50), weight_decay=0.01
)
tx = optax.chain(onebit_jax.clip_by_worker_norm(1.5, "data"), adamw)
tx = onebit_jax.accumulate(tx, MICRO_BATCHES, "data")
# Outside of `accumulate`: micro-batches of one update may have different scales.
tx = optax.chain(unscale(), tx)
tx = onebit_jax.skip_nonfinite(tx, "data")


def loss_fn(params, batch, scale):
    """The scaled loss in float16, and the loss itself."""
    x, labels = batch
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    hidden = jax.nn.relu(x.astype(jnp.float16) @ half["first"])
    logits = (hidden @ half["last"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    loss = jnp.mean(losses)
    return loss * scale, loss


def batch_of(step):
    """Features with labels: the quadrant of the first two."""
    x = jax.random.normal(jax.random.key(step), (256, 64))
    return x, 2 * (x[:, 0] > 0) + (x[:, 1] > 0)


initialize = jax.nn.initializers.lecun_normal()
run = onebit_jax.data_parallel(loss_fn, tx, mesh, has_aux=True)
params, state = run.init(
    {
        "first": initialize(jax.random.key(0), (64, 256)),
        "last": initialize(jax.random.key(1), (256, 4)),
    }
)
scale, since, skipped = jnp.float32(2**INITIAL_SCALE_POWER), 0, 0
for step in range(MICRO_BATCHES * 150):
    params, state, _, loss = run.step(params, state, batch_of(step), scale, scale=scale)
    since += 1
    now = int(onebit_jax.metrics(state)["skipped"])
    if now > skipped:  # the scale and its window belong into a checkpoint, too
        scale, since, skipped = jnp.maximum(scale / 2, MIN_LOSS_SCALE), 0, now
    elif since > LOSS_SCALE_WINDOW * MICRO_BATCHES:
        scale, since = scale * 2, 1

onebit_jax.assert_replicas_identical(params, mesh)
print(f"loss {loss:.3f}, {skipped} micro-batches skipped, scale {scale:.0f}")
for stage, sent in onebit_jax.stage_costs(tx, params, mesh.shape, scale=scale).items():
    print(stage, onebit_jax.sent_bytes(sent, mesh.shape), "bytes an update")
