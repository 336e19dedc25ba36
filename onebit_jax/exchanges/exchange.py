"""The form of an exchange, and the exact one."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
import optax

from onebit_jax.exchanges.shards import PerShardState
from onebit_jax.workers.arithmetic import means
from onebit_jax.workers.axes import AxisNames, as_tuple, bound_workers, check_local
from onebit_jax.workers.specs import names_of, typed_spec
from onebit_jax.workers.worker_local import WorkerLocal

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import PartitionSpec
    from jax.typing import ArrayLike


if TYPE_CHECKING:

    class _Transformation(optax.GradientTransformationExtraArgs):
        # What Optax's functions take, to a type checker; when they run, `init` and
        # `update` are enough.
        def __new__(cls, *args: Any, **options: Any) -> Self: ...

else:
    _Transformation = abc.ABC


class Exchange(_Transformation):
    """A gradient transformation from each worker's own tree to an agreed tree.

    A subclass is a frozen dataclass, a plain value. As it has `init` and `update`, it
    chains with Optax's transformations; as it knows the mesh axes that it works over,
    an optimizer given an exchange knows its workers.

    Attributes:
      axes: names of the mesh axes whose members are the workers.
      keeps_scale: False where what is agreed lies in [-1, 1] whatever was given, as
        votes do.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp
      >>> import onebit_jax
      >>> from onebit_jax import Exchange
      >>> @dataclasses.dataclass(frozen=True)
      ... class ClippedMean(Exchange):
      ...     axes: tuple[str, ...]
      ...     limit: float
      ...     def update(self, updates, state, params=None):
      ...         def mean(g):
      ...             own = jnp.clip(g, -self.limit, self.limit)
      ...             return jax.lax.pmean(own, self.axes)
      ...         return jax.tree.map(mean, updates), state
      >>> exchange = ClippedMean(('data',), limit=2.0)
      >>> def mean(g):
      ...     return exchange.update(g, exchange.init(g))[0]
      >>> print(jax.vmap(mean, axis_name='data')(jnp.array([1.0, 7.0])))
      [1.5 1.5]
      >>> sizes = {'data': 4}
      >>> cost = onebit_jax.stage_costs(exchange, jnp.zeros(500), sizes)['every']
      >>> onebit_jax.sent_bytes(cost, sizes)
      3000
    """

    axes: tuple[str, ...]
    keeps_scale: ClassVar[bool] = True

    def __init_subclass__(cls, of_shards: bool = True) -> None:
        super().__init_subclass__()
        # What is sharded inside a worker is exchanged as by `per_shard`, whatever
        # stands around the exchange.
        for name in ("init", "update", "exchange_momentum"):
            if of_shards and name in vars(cls):
                setattr(cls, name, _of_shards(name, vars(cls)[name]))

    def init(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, params: optax.Params
    ) -> Any:
        """Makes the state: here one without arrays, which declares the workers.

        Args:
          params: parameters, or their shapes and dtypes; real floating-point.

        Returns:
          A tree; what differs from worker to worker is in `WorkerLocal` nodes.
        """
        del params
        return WorkerLocal((), self.axes, "drop")

    @abc.abstractmethod
    def update(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        """Exchanges, inside `jax.shard_map` over the axes.

        Args:
          updates: each worker's own tree.
          state: from `init`, or the last `update`.
          params: not looked at; Optax passes them.

        Returns:
          A tree of the same shapes and dtypes that all workers agree on, and the state.

        Raises:
          TypeError: for leaves that are not real floating-point.
          ValueError: for leaves that are averaged already, an axis that is not bound,
            or a state of another number of workers.
        """

    def exchange_momentum(
        self,
        gradients: optax.Updates,
        momentum: optax.Params,
        decay: ArrayLike,
        state: Any,
    ) -> tuple[optax.Updates, Any]:
        r"""Exchanges :math:`\beta m + (1 - \beta) g^{(i)}`.

        Args:
          gradients: each worker's own.
          momentum: float32, the same on all workers.
          decay: :math:`\beta`.
          state: as of `update`.

        Returns:
          The agreed momentum, float32, and the state. It is that of `update`; an
          exchange may make the sum in the pass over memory that encodes it.
        """
        gradients = optax.tree.cast(gradients, jnp.float32)
        return self.update(
            optax.tree.update_moment(gradients, momentum, decay, 1), state
        )

    @property
    def senders(self) -> tuple[str, ...]:
        """The axes between whose members messages are compressed."""
        return self.axes

    def is_exact(self, shape: tuple[int, ...]) -> bool:
        """True of the shape of a leaf of which all workers agree on the mean itself.

        An optimizer has no reason there to freeze a variance. What is true of a shape
        must be of its shards.
        """
        del shape
        return False

    def is_alone(self) -> bool:
        """True of a single worker.

        An optimizer has no reason there to freeze a variance.

        Raises:
          ValueError: if an axis is not bound.
        """
        return bound_workers(self.axes) == 1


def _of_shards(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an exchange, or of the `per_shard` around it."""

    @functools.wraps(method)
    def of_shards(self: Exchange, first: Any, *args: Any, **options: Any) -> Any:
        state = args[2] if name == "exchange_momentum" else (args or (None,))[0]
        specs = _specs_of(first, state)
        if not any(map(names_of, specs)):
            return method(self, first, *args, **options)
        # Not above: `per_shard` is an exchange itself.
        from onebit_jax.exchanges.per_shard import per_shard

        treedef = jax.tree.structure(first)
        is_alike = treedef.num_leaves == len(specs)
        around = per_shard(self, treedef.unflatten(specs) if is_alike else list(specs))
        return getattr(around, name)(first, *args, **options)

    return of_shards


def _specs_of(tree: Any, state: Any) -> tuple[PartitionSpec, ...]:
    """The partitions of leaves inside a worker.

    Their types tell those of parameters, over explicit axes; later a state that was
    made for these does.
    """
    if state is None:
        return tuple(map(typed_spec, jax.tree.leaves(tree)))
    return state.specs.specs if isinstance(state, PerShardState) else ()


Exchange.init = _of_shards("init", Exchange.init)


@dataclasses.dataclass(frozen=True)
class ExactMean(Exchange):
    """The exchange of `exact_mean`."""

    axes: tuple[str, ...]

    def is_exact(self, shape: tuple[int, ...]) -> bool:
        """True of every leaf."""
        del shape
        return True

    def update(
        self,
        updates: optax.Updates,
        state: WorkerLocal,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, WorkerLocal]:
        """The means of the leaves."""
        del params
        check_local(updates, self.axes, "exact_mean")
        return means(updates, self.axes), state


def exact_mean(axis: AxisNames) -> Exchange:
    r"""Averages over the workers exactly: one all-reduce in the leaves' dtype.

    But float16 goes as float32, as it cannot hold the sums, and so does bfloat16 where
    other mesh axes are automatic.

    .. math:: \bar g = \frac{1}{n} \sum_i g^{(i)}

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.

    Returns:
      An exchange without a state.

    Raises:
      TypeError: from `update`, for leaves that are not real floating-point.
      ValueError: from `update`, if an axis is not bound or leaves are averaged already.

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
    return ExactMean(as_tuple(axis))
