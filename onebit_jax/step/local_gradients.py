"""Each worker's own gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from onebit_jax.workers.axes import (
    AxisNames,
    as_tuple,
    bound_workers,
    is_agreed,
    to_varying,
    varying_axes,
)


def local_value_and_grad(
    fun: Callable[..., Any],
    axis: AxisNames,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` of each worker's own loss, for use in `jax.shard_map`.

    With respect to parameters that are the same on all workers, `jax.grad` sums the
    gradients over the workers, in full precision: the very exchange that compression
    is to replace. Here every worker differentiates with respect to its own copy.

    Under `shard_map(check_vma=False)` nothing records what is the same on all workers.
    Then neither this function nor an exchange can refuse a loss, or gradients, that are
    averaged already. All workers would compress the same values.

    Args:
      fun: this worker's own loss, not averaged over the workers; a function as for
        `jax.value_and_grad`. A count that it divides by may be averaged,
        by `jax.lax.pmean(count, axis)`, and must be where workers' counts differ.
      axis: name, or names, of the mesh axes whose members are the workers.
      argnums: which arguments to differentiate with respect to.
      has_aux: whether `fun` returns a pair of the value and anything else.

    Returns:
      A function like `fun` that returns its value and this worker's gradients.

    Raises:
      ValueError: when called where the axis is not bound, or if the loss is averaged
        over the workers already. Or if it differs over other axes too, over which
        gradients would be summed. Only `shard_map(check_vma=True)` records this.
      TypeError: when called with keywords alone, or if `fun` returns a pair without
        `has_aux`, or no pair with it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=(P(), P('data')), out_specs=P('data'))
      ... def f(p, x):
      ...     loss, gradient = local_value_and_grad(
      ...         lambda p: jnp.sum(p * x), 'data')(p)
      ...     return gradient
      >>> f(jnp.zeros(2), jnp.array([3.0, 4.0]))
      Array([3., 4.], dtype=float32)
    """
    axes = as_tuple(axis)

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        _check_aux(result, has_aux)
        return result

    value_and_grad = jax.value_and_grad(checked, argnums, has_aux)
    numbers = {argnums} if isinstance(argnums, int) else set(argnums)

    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        bound_workers(axes)
        if not args:
            raise TypeError(
                "pass what is differentiated with respect to by position, not by name."
            )
        places = {n % len(args) for n in numbers}
        local = [
            to_varying(arg, axes) if place in places else arg
            for place, arg in enumerate(args)
        ]
        result, gradients = value_and_grad(*local, **kwargs)
        value = result[0] if has_aux else result
        # The parameters vary by their type, so that a loss made from them does too.
        if is_agreed(value, axes):
            raise ValueError(
                f"the loss is the same on every worker of {axes}: return this worker's "
                "own loss, made from the parameters and not averaged (a count may be "
                "averaged), or its gradients are divided by the workers once more."
            )
        _check_summed([local[place] for place in sorted(places)], value, axes)
        return result, gradients

    return wrapped


def _check_summed(params: Any, value: Any, axes: tuple[str, ...]) -> None:
    """Refuses a loss whose gradients are summed over other axes."""
    shared = [varying_axes(value) - varying_axes(p) for p in jax.tree.leaves(params)]
    if further := sorted(frozenset().union(*shared)):
        raise ValueError(
            f"the loss differs over {tuple(further)} too, where the parameters are the "
            "same, and its gradients would be summed over that: name these axes in "
            f"local_value_and_grad(loss, {(*axes, *further)}) and in the exchange, or "
            "return the loss's jax.lax.pmean over them."
        )


def _check_aux(result: Any, has_aux: bool) -> None:
    several = isinstance(result, tuple | list)
    if several and not has_aux:
        raise TypeError(
            "the loss function returns more than the loss: pass has_aux=True, and "
            "return a pair, (loss, aux), of the loss and a tree of auxiliary values."
        )
    if has_aux and not (several and len(result) == 2):
        raise TypeError(
            "has_aux=True was passed and the loss function returns no pair: return "
            "(loss, aux), of the loss and a tree of auxiliary values, or leave "
            "has_aux=True out."
        )
