"""What an exchange is, and the exact one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from onebit_jax import _axes

if TYPE_CHECKING:
    from onebit_jax._wire import Wire


class Exchange(optax.GradientTransformationExtraArgs):
    """A gradient transformation from each worker's own tree to an agreed tree.

    `update` takes leaves that differ from worker to worker and returns leaves that
    are the same on all of them; what it must remember is its state. It knows the
    mesh axes that it works over, so that an optimizer given an exchange knows its
    workers.

    Attributes:
      axes: names of the mesh axes whose members are the workers.
      fused: `exchange_momentum` in one pass over memory, where the exchange has one.
      wire: its wire format, where it compresses buckets of blocks.
      delay: steps by which what it returns is behind what it is given, of normally
        distributed values; see `scale_by_onebit_adam`, which makes up for it.
    """

    axes: tuple[str, ...]
    fused: Callable[..., tuple[Any, Any]] | None
    wire: Wire | None
    delay: float

    def __new__(
        cls,
        init: Callable[..., Any],
        update: Callable[..., Any],
        axes: tuple[str, ...],
        fused: Callable[..., tuple[Any, Any]] | None = None,
        wire: Wire | None = None,
        delay: float = 0.0,
    ) -> Self:
        """Makes an exchange of its functions and its axes.

        Raises:
          ValueError: if `delay` is negative or not finite.
        """
        if not 0 <= delay < math.inf:
            raise ValueError(
                "delay must be a finite number of steps, 0 for an exchange that"
                f" returns what it is given; got {delay}."
            )
        self = super().__new__(cls, init, update)
        self.axes = axes
        self.fused = fused
        self.wire = wire
        self.delay = float(delay)
        return self

    @classmethod
    def of_momentum(
        cls,
        init: Callable[..., Any],
        fused: Callable[..., tuple[Any, Any]],
        axes: tuple[str, ...],
        wire: Wire | None = None,
        delay: float = 0.0,
    ) -> Self:
        """Makes an exchange whose update is that of a momentum that is not there.

        Args:
          init: the exchange's.
          fused: from updates, momentum, decay and state to agreed tree and new state;
            a momentum of None stands for the updates as they are.
          axes: the exchange's.
          wire: the exchange's.
          delay: the exchange's.

        Returns:
          The exchange.
        """

        def update_fn(
            updates: optax.Updates,
            state: Any,
            params: optax.Params | None = None,
            **extra_args: object,
        ) -> tuple[Any, Any]:
            del params, extra_args
            nothing = jax.tree.map(lambda _: None, updates)
            return fused(updates, nothing, None, state)

        return cls(init, update_fn, axes, fused, wire, delay)

    def __getnewargs__(self):  # copies are made by __new__, which takes all six
        return (*self, self.axes, self.fused, self.wire, self.delay)

    def exchange_momentum(
        self, gradients: optax.Updates, momentum: optax.Params, decay: Any, state: Any
    ) -> tuple[optax.Updates, Any]:
        r"""Exchanges :math:`\beta m + (1 - \beta) g^{(i)}`.

        Args:
          gradients: each worker's own.
          momentum: float32, the same on all workers.
          decay: :math:`\beta`.
          state: the exchange's.

        Returns:
          The agreed momentum, float32, and the new state.
        """
        if self.fused is not None:
            return self.fused(gradients, momentum, decay, state)
        gradients = optax.tree.cast(gradients, jnp.float32)
        local = optax.tree.update_moment(gradients, momentum, decay, 1)
        return self.update(local, state)


class ExactMeanState(NamedTuple):
    """Nothing; its type marks that the transformation has collectives."""


def exact_mean(axis: _axes.AxisNames) -> Exchange:
    r"""Averages over the workers exactly: one all-reduce in the leaves' dtype.

    .. math:: \bar g = \frac{1}{n} \sum_i g^{(i)}

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.

    Returns:
      An exchange. Its update raises `TypeError` for leaves that are not real
      floating-point and `ValueError` for leaves that are averaged already or an
      axis that is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = optax.chain(exact_mean('data'), optax.sgd(1.0))
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=P('data'), out_specs=P())
      ... def f(g):
      ...     return tx.update(g[0], tx.init(g[0]))[0]
      >>> f(jnp.ones((1, 2)))
      Array([-1., -1.], dtype=float32)
    """
    axes = _axes.as_tuple(axis)

    def init_fn(params: optax.Params) -> ExactMeanState:
        del params
        return ExactMeanState()

    def update_fn(
        updates: optax.Updates,
        state: ExactMeanState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, ExactMeanState]:
        del params, extra_args
        _axes.bound_workers(axes)
        _axes.check_local(updates, axes, "exact_mean")
        return jax.tree.map(lambda g: _axes.mean(g, axes), updates), state

    return Exchange(init_fn, update_fn, axes)
