"""Parts that the losses of several tasks are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.dropout import sequence_keys
from train.core.batches import element, place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grain
    from jax.sharding import Mesh
    from jaxtyping import Array, Float, Int, Key

    from train.core.task import Evaluation, Params

Model = TypeVar("Model", bound=nnx.Module)


def init_params(build: Callable[..., nnx.Module], seed: int) -> Params:
    """The first parameters, nested dictionaries, of a model that is built of `rngs`."""
    return nnx.to_pure_dict(nnx.state(build(rngs=nnx.Rngs(seed)), nnx.Param))


def graph_of(build: Callable[..., Model]) -> nnx.GraphDef[Model]:
    """The part of a model that is not parameters, for `flax.nnx.merge`."""
    return nnx.graphdef(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))


def dropout_keys(
    rate: float, seed: int, step: Int[Array, ""], share: int, axes: str | Sequence[str]
) -> Key[Array, " share"] | None:
    """A key for each example of a worker's share, by which it drops activations.

    They are a function of the seed, the step and the place of an example in the whole
    batch: the number of workers does not matter to them. None where nothing is dropped.
    """
    if not rate:
        return None
    first = jax.lax.axis_index(axes) * share
    key = jax.random.fold_in(jax.random.key(seed), step)
    return sequence_keys(key, first + jnp.arange(share))


def mean_over(
    loss_fn: Callable[[Params, Any], Float[Array, ""]],
    batches: grain.MapDataset[Any],
    examples: int,
    mesh: Mesh,
) -> Callable[[Params], Evaluation]:
    """The evaluation of a `train.core.task.Phase`: the mean loss of the first examples.

    So many of them, to the next whole batch of this process's parts.
    """

    def compiled(params: Params) -> Evaluation:
        first = place(element(batches, 0), mesh)
        count = -(-examples // jax.tree.leaves(first)[0].shape[0])
        rest = [place(element(batches, i), mesh) for i in range(1, count)]
        loss_of = jax.jit(loss_fn).lower(params, first).compile()
        # One at a time: on virtual devices, programs in flight together can each hold
        # threads that another's collective waits for.
        return lambda params: {
            "loss": float(np.mean([loss_of(params, x).item() for x in (first, *rest)]))
        }

    return compiled


def accumulated(
    loss_fn: Callable[..., Float[Array, ""]], parts: int
) -> Callable[..., Float[Array, ""]]:
    """Σ loss(params, part), whose gradient is computed beside it, part by part.

    Only one part's activations are held at a time. Differentiating a loop over the
    parts would hold all of them, or compute each forward pass twice. The sums are of
    float32.

    Args:
      loss_fn: From parameters, a part of the examples, and constants to a loss. Only
        the parameters are differentiated with respect to.
      parts: Into how many equal parts the examples are divided along their first axis,
        in their order.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from train.core.objective import accumulated
      >>> loss_fn = accumulated(lambda p, x, c: jnp.sum(p * x**2) / c, 3)
      >>> jax.value_and_grad(loss_fn)(jnp.float32(2), jnp.arange(6.0), 5.0)
      (Array(22., dtype=float32), Array(11., dtype=float32))
    """
    if parts == 1:
        return loss_fn

    def loss_and_gradient(params: Any, examples: Any, constants: Any) -> Any:
        divided = jax.tree.map(
            lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), examples
        )

        def add(total: Any, part: Any) -> tuple[Any, None]:
            one = jax.value_and_grad(loss_fn)(params, part, constants)
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, one), None

        one = jax.eval_shape(
            lambda part: jax.value_and_grad(loss_fn)(params, part, constants),
            jax.tree.map(lambda x: x[0], divided),
        )
        return jax.lax.scan(add, jax.tree.map(_zeros, one), divided)[0]

    @jax.custom_vjp
    def total(params: Any, examples: Any, constants: Any) -> Float[Array, ""]:
        return loss_and_gradient(params, examples, constants)[0]

    def forward(params: Any, examples: Any, constants: Any) -> Any:
        loss, gradient = loss_and_gradient(params, examples, constants)
        return loss, jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params)

    def backward(gradient: Any, cotangent: Float[Array, ""]) -> Any:
        scaled = jax.tree.map(lambda g: g * cotangent.astype(g.dtype), gradient)
        return scaled, None, None

    total.defvjp(forward, backward)
    return total


def _zeros(like: jax.ShapeDtypeStruct) -> Array:
    """Zeros that vary over the mesh axes that what is added to them varies over."""
    zeros = jnp.zeros(like.shape, jnp.float32)
    kind = like.manual_axis_type  # none outside of shard_map
    return jax.lax.pcast(zeros, tuple(kind.varying) if kind else (), to="varying")
