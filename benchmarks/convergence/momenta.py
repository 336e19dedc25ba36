"""Momenta that Muon's workers may exchange besides distances."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import onebit_jax
from train.core.optimizer import matrices, muon

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from jax import Array
    from jaxtyping import Bool

MUON_DECAY = 0.95
"""That of the momentum of Optax's Muon."""


class AveragedState(NamedTuple):
    """State of `averaged_momenta`.

    Attributes:
      steps: That of the local steps.
      exchange: That of the momenta's exchange.
    """

    steps: Any
    exchange: Any


def averaged_momenta(
    steps: optax.GradientTransformationExtraArgs, exchange: onebit_jax.Exchange
) -> optax.GradientTransformationExtraArgs:
    """Local steps whose workers agree on their momenta, too, when they synchronise.

    Each worker's first moments become what the exchange makes of all workers'.

    Args:
      steps: Local steps.
      exchange: What the workers do with their first moments.

    Returns:
      A transformation with the stages of the local steps.
    """

    def init(params: optax.Params) -> Any:
        state: Any = steps.init(params)
        momenta = [node.value[0] for node in _momenta(state.inner)]
        return AveragedState(state, exchange.init(momenta))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        stage: str | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        new: Any
        agreed, new = steps.update(
            updates, state.steps, params, stage=stage, **extra_args
        )
        due = new.synchronised > state.steps.synchronised

        def synchronise() -> tuple[Any, Any]:
            own = [node.value[0] for node in _momenta(new.inner)]
            means, errors = exchange.update(own, state.exchange)
            return _with_momenta(new.inner, means, due), errors

        stages: dict[str, Callable[[], tuple[Any, Any]]] = {
            "local": lambda: (new.inner, state.exchange),
            "sync": synchronise,
        }
        inner, errors = onebit_jax.run_stage(stages, due.astype(jnp.int32), stage)
        return agreed, AveragedState(new._replace(inner=inner), errors)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_momentum(path: tuple[Any, ...]) -> bool:
    """True of what Optax's optimizers call mu."""
    return any(getattr(key, "name", None) == "mu" for key in path)


def _is_own(node: Any) -> bool:
    return isinstance(node, onebit_jax.WorkerLocal)


def _momenta(inner: Any) -> list[onebit_jax.WorkerLocal]:
    found = jax.tree.leaves_with_path(inner, is_leaf=_is_own)
    return [node for path, node in found if _is_momentum(path)]


def _with_momenta(inner: Any, means: Any, due: Bool[Array, ""]) -> Any:
    left = iter(means)

    def put(path: tuple[Any, ...], node: onebit_jax.WorkerLocal) -> Any:
        if not _is_momentum(path):
            return node
        # A choice that is made already: its type is that of values that differ.
        value = jnp.where(due, next(left)[None], node.value)
        return dataclasses.replace(node, value=value)

    return jax.tree_util.tree_map_with_path(put, inner, is_leaf=_is_own)


def muon_of_momenta(
    schedule: optax.Schedule,
    exchange: onebit_jax.Exchange,
    *,
    weight_decay: float,
    mask: Any,
) -> optax.GradientTransformation:
    """Muon whose workers send their momenta of matrices before orthogonalisation.

    Each has its own momentum, Nesterov's, of which the mean is that of the mean
    gradient. Of leaves that are Adam's, gradients are sent by 8 bits.

    Args:
      schedule: The rate of Adam.
      exchange: What the workers do with their momenta.
      weight_decay: λ of decoupled weight decay.
      mask: Which parameters decay.

    Returns:
      A transformation for `onebit_jax.data_parallel`.
    """
    own = optax.trace(MUON_DECAY, nesterov=True)
    sent: dict[Hashable, Any] = {
        "matrix": optax.chain(onebit_jax.per_worker(own, exchange.axes), exchange),
        "other": onebit_jax.quantized_mean(exchange.axes, 8),
    }
    # What is agreed is a momentum already.
    agreed = muon(schedule, weight_decay=weight_decay, mask=mask, beta=0.0)
    return optax.chain(optax.partition(sent, _kinds), agreed)


def _kinds(params: Any) -> Any:
    def kind(numbers: Any) -> str:
        return "other" if numbers is None else "matrix"

    def is_leaf(node: Any) -> bool:
        return node is None or isinstance(node, optax.contrib.MuonDimensionNumbers)

    return jax.tree.map(kind, matrices(params), is_leaf=is_leaf)
