"""Local steps: any optimizer on each worker, and an exchange of the way it has gone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax.exchanges.exchange import Exchange
from onebit_jax.optimizers.parts.intervals import (
    check_interval_rule,
    steps_before_due,
    update_in_stage,
)
from onebit_jax.workers.arithmetic import means
from onebit_jax.workers.axes import check_floats, check_local, to_varying
from onebit_jax.workers.per_worker import each_own, per_worker, this_worker
from onebit_jax.workers.stages import run_stage
from onebit_jax.workers.states import optimizer_state, own_params

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Int32

    from onebit_jax.optimizers.parts.intervals import IntervalRule


@optimizer_state
class LocalStepsState(NamedTuple):
    """State of `local_steps`.

    Attributes:
      count: number of steps taken.
      synchronised: how many of them synchronised.
      moved: by how much each worker's parameters differ from the agreed ones, float32,
        a `WorkerLocal` for each leaf; zero after a synchronisation.
      inner: state of each worker's own optimizer, a `PerWorkerState`.
      sync: state of the rule for synchronising.
      exchange: state of the exchange.
      outer: state of the outer optimizer.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    synchronised: Int32[Array, ""]
    moved: Any
    inner: Any
    sync: Any
    exchange: Any
    outer: Any

    local_stages = ("local",)

    def distance(self) -> Any:
        """Each worker's own steps since the last synchronisation."""
        return self.moved

    def steps_by_stage(self) -> dict[str, Array]:
        """Steps that each worker took alone, and those that synchronised."""
        return {
            "local": self.count - self.synchronised,
            "sync": self.synchronised,
        }

    def metrics(self) -> dict[str, Array]:
        """Measures of the optimizer; see `onebit_jax.metrics`.

        Returns:
          `count`, steps taken; `synchronised`, steps that exchanged.
        """
        return {"count": self.count, "synchronised": self.synchronised}

    def steps_left(self, stage: str) -> int | None:
        """The steps that workers take alone before a synchronisation is due."""
        return steps_before_due(self.sync) if stage == "local" else None


def local_steps(
    inner: optax.GradientTransformation,
    exchange: Exchange,
    sync: IntervalRule,
    outer: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Steps of each worker's own optimizer, and an exchange of their sum at intervals.

    Each worker i computes its gradients at its own parameters :math:`p^{(i)} = p +
    d^{(i)}` (`onebit_jax.own_params`), and in every step, with T the inner optimizer,

    .. math:: d^{(i)} \leftarrow d^{(i)} + T\left(g^{(i)}, p^{(i)}\right)

    In a step that synchronises, with E the exchange and S the outer optimizer,

    .. math::
      p \leftarrow p + S\left(-E\left[d^{(i)}\right], p\right), \quad
      d^{(i)} \leftarrow 0

    The agreed parameters p move in these steps alone. The errors of the exchange are
    of the distances, so that no rate of S enters them.

    The state of T is each worker's own, as of `per_worker`, and it goes on through a
    synchronisation. Its schedules count steps, and its weight decay acts on the
    worker's own parameters. T and S are given parameters and gradients in float32. What
    limits or skips a worker's own steps stands inside: `optax.apply_if_finite(inner,
    5)` keeps a worker whose gradients are not finite where it is, and asks nobody. A
    distance that is not finite reaches all workers.

    With another number of workers (`resize`) each worker begins at the mean of the
    workers' parameters, with the mean of their moments. The mean distance is kept, and
    what the workers differed by is lost.

    The agreed parameters lack what the workers have gone since the last
    synchronisation. So let the last step of a run synchronise, by
    `sync.ending_at(steps)`. Where a `skip_nonfinite` around it may skip steps, take
    `stage='sync'`.

    Args:
      inner: each worker's own optimizer, such as `optax.adamw(1e-3)`, learning rate
        included.
      exchange: what workers do with their distances, such as `sign_mean('data')`. With
        `hierarchical` a host is one worker: in every step it takes the exact mean of
        its devices' gradients.
      sync: which steps synchronise, such as `every(8)`.
      outer: makes the agreed step, with the mean distance that is left to go,
        :math:`p - \bar p`, in the place of a gradient; None for the mean distance
        itself, which is `optax.sgd(1.0)`.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with each
      worker's own gradients, at its own parameters, and with the agreed parameters. In
      a chain it must be the last: what scaled its updates would not scale the workers'
      own steps. Its updates are those of the agreed parameters, zero in a step that
      does not synchronise. It takes the extra argument `stage`: 'local', which has no
      collective between workers, or 'sync'; None for a program of both. 'local' where a
      synchronisation is due is refused by `data_parallel`; 'sync' before that begins
      the interval anew. Other extra arguments go to the inner optimizer.

    Raises:
      TypeError: if a part is not of its type, the exchange returns votes, or, from
        `init` and `update`, for leaves that are not real floating-point.
      ValueError: from `init`, if the inner optimizer exchanges over the workers' axes.
        From `update`, without parameters, if gradients are averaged already, an axis is
        not bound, or the state is one of another number of workers.

    Example:
      >>> import jax.numpy as jnp, onebit_jax, optax
      >>> tx = onebit_jax.local_steps(
      ...     optax.sgd(0.5), onebit_jax.exact_mean('data'), onebit_jax.every(2))
      >>> def loss(p, x):
      ...     return jnp.mean((p - x) ** 2) / 2
      >>> run = onebit_jax.simulated(loss, tx, workers=2)
      >>> params, state = run.init(jnp.float32(0))
      >>> for _ in range(4):
      ...     params, state, loss = run.step(params, state, jnp.array([4.0, 8.0]))
      ...     print(params, onebit_jax.mean_params(params, state))
      0.0 3.0
      4.5 4.5
      4.5 5.25
      5.625 5.625

    References:
      Stich, Local SGD converges fast and communicates little, 2018,
      https://arxiv.org/abs/1805.09767; with an outer optimizer Douillard et al.,
      DiLoCo, 2023, https://arxiv.org/abs/2311.08105, Algorithm 1.
    """
    if not isinstance(exchange, Exchange):
        raise TypeError(
            "local_steps needs an exchange, such as sign_mean('data'), got "
            f"{exchange!r}."
        )
    if not exchange.keeps_scale:
        raise TypeError(
            "what is agreed on is how far workers have gone, and votes have no scale: "
            f"give local_steps an exchange such as sign_mean('data'), not {exchange!r}."
        )
    check_interval_rule("sync", sync)
    steps = _LocalSteps(
        inner=per_worker(inner, exchange.senders),
        exchange=exchange,
        sync=sync,
        outer=optax.sgd(1.0) if outer is None else outer,
    )
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LocalSteps:
    inner: optax.GradientTransformationExtraArgs
    exchange: Exchange
    sync: IntervalRule
    outer: optax.GradientTransformation

    def init(self, params: optax.Params) -> Any:
        check_floats(params, "local_steps")
        params = jax.tree.map(_as_float32, params)
        # Each anew: a buffer that is in a state twice cannot be donated.
        return LocalStepsState(
            count=jnp.zeros([], jnp.int32),
            synchronised=jnp.zeros([], jnp.int32),
            moved=self.own(optax.tree.zeros_like(params)),
            inner=self.inner.init(params),
            sync=self.sync.init(),
            exchange=self.exchange.init(params),
            outer=self.outer.init(params),
        )

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        stage: str | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        """The updates of the agreed parameters, and the new state."""
        if params is None:
            raise ValueError("local_steps needs the parameters: give them to update.")
        check_local(updates, self.exchange.axes, "local_steps")
        gradients = optax.tree.cast(updates, jnp.float32)
        if self.inside:
            gradients = means(gradients, self.inside)
        params = optax.tree.cast(params, jnp.float32)
        count = jnp.asarray(optax.safe_increment(state.count))
        happens = None if stage is None else stage == "sync"
        due, sync = update_in_stage(self.sync, state.sync, count, happens)
        step, inner = self.inner.update(
            gradients, state.inner, own_params(params, (state,)), **extra_args
        )
        state = state._replace(count=count, sync=sync, inner=inner)

        def moved() -> optax.Updates:
            return optax.tree.add(this_worker(state.moved, self.exchange.senders), step)

        def local() -> tuple[optax.Updates, Any]:
            zeros = optax.tree.zeros_like(params)
            return zeros, state._replace(moved=self.own(moved()))

        def synchronise() -> tuple[optax.Updates, Any]:
            return self.synchronised(moved(), state, params)

        stages = {"local": local, "sync": synchronise}
        agreed, state = run_stage(stages, due.astype(jnp.int32), stage)
        return optax.tree.cast_like(agreed, updates), state

    def synchronised(
        self, moved: optax.Updates, state: Any, params: optax.Params
    ) -> tuple[optax.Updates, Any]:
        """The agreed step, and the state of workers that are where all are."""
        each = to_varying(moved, self.exchange.axes)
        mean, exchange = self.exchange.update(each, state.exchange)
        left = jax.tree.map(jnp.negative, mean)
        agreed, outer = self.outer.update(left, state.outer, params)
        return agreed, state._replace(
            synchronised=state.synchronised + 1,
            moved=self.own(optax.tree.zeros_like(mean)),
            exchange=exchange,
            outer=outer,
        )

    def own(self, tree: Any) -> Any:
        """A tree as worker-local state, whether or not workers agree on it."""
        return each_own(tree, self.exchange.senders)

    @property
    def inside(self) -> tuple[str, ...]:
        """The axes of the devices that are one worker."""
        between = self.exchange.senders
        return tuple(name for name in self.exchange.axes if name not in between)


def _as_float32(p: Any) -> Any:
    # Parameters, or their shapes.
    if isinstance(p, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(p.shape, jnp.float32)
    return p.astype(jnp.float32)
