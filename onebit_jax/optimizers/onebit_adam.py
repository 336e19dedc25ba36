"""1-bit Adam: warm-up Adam, the variance freeze, then one bit a parameter."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.optimizers.parts.checks import check_parts, gradient_mean
from onebit_jax.optimizers.parts.compressed import Compressed, check_compressed
from onebit_jax.optimizers.parts.error_norms import error_norms
from onebit_jax.optimizers.parts.freeze import (
    Freezing,
    freeze_then,
    stage_refusal,
    warn_if_rising,
)
from onebit_jax.optimizers.parts.moments import (
    as_float32,
    divide_by_weight,
    weight,
)
from onebit_jax.workers.arithmetic import ordered_after
from onebit_jax.workers.states import optimizer_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32, Int32

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.optimizers.parts.freeze import FreezeRule
    from onebit_jax.optimizers.parts.growth import GrowthState

_PARTS = Compressed()


@optimizer_state
class ScaleByOnebitAdamState(NamedTuple):
    """State of `scale_by_onebit_adam`.

    Attributes:
      count: number of steps taken.
      mu: momentum, float32, the same on all workers.
      nu: variance, float32, without bias correction; frozen once `frozen_at` is set,
        but for leaves that are exchanged exactly, where there is a growth.
      frozen_at: number of steps taken when the variance was frozen; 0 as long as it
        is not.
      floored: share of the frozen variances that the floor raised.
      freeze: state of the freeze rule.
      growth: state of the growth; None without it.
      exchange: state of the exchange.
      warmup: state of the warm-up's own exchange.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: optax.Params
    nu: optax.Params
    frozen_at: Int32[Array, ""]
    floored: Float32[Array, ""]
    freeze: Any
    growth: GrowthState | None
    exchange: Any
    warmup: Any

    warmup_stages = ("warmup",)

    def steps_by_stage(self) -> dict[str, Array]:
        """Warm-up, and compressed steps; those that measure the growth apart."""
        warmup = jnp.where(self.frozen_at > 0, self.frozen_at, self.count)
        compressed = self.count - warmup
        if self.growth is None:
            return {"warmup": warmup, "compressed": compressed}
        measured = self.growth.measured
        # Order matters: the training log names the last stage that has new steps.
        return {
            "warmup": warmup,
            "compressed/measuring": measured,
            "compressed": compressed - measured,
        }

    def metrics(self) -> dict[str, Array]:
        """Measures of the optimizer; see `onebit_jax.metrics`.

        Returns:
          `count`, steps taken; `compressed`, 1 once the variance is frozen;
          `frozen_at`, the steps taken by then; `floored_share`, frozen variances that
          the floor raised; `worker_error` and `server_error`, as in `error_norms`.
        """
        return {
            "count": self.count,
            "compressed": (self.frozen_at > 0).astype(jnp.int32),
            "frozen_at": self.frozen_at,
            "floored_share": self.floored,
            **error_norms(self.exchange, self.mu),
        }

    def refusal(self, stage: str) -> str | None:
        """Before the freeze only the warm-up can be, after it only the other."""
        return stage_refusal(self.frozen_at, stage)


def scale_by_onebit_adam(
    exchange: Exchange,
    freeze: FreezeRule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    bias_correction: bool = True,
    warmup_exchange: Exchange | None = None,
    compressed: Compressed = _PARTS,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales each worker's own gradients by 1-bit Adam.

    In the warm-up, Adam on the exact mean of the gradients; a single worker, which has
    nobody to exchange with, stays in it. After the freeze, with
    :math:`v` as it was then, after T steps, and :math:`E` the exchange,

    .. math::
      m_t &= E[\beta_1 m_{t-1} + (1 - \beta_1) g_t^{(i)}], \quad
      \hat m_t = \frac{m_t}{1 - \beta_1^t} \\
      u_t &= \mathrm{clip}\left(\frac{\hat m_t + d (\hat m_t - \hat m_{t-1})}
      {\sqrt{\rho_t v / (1 - \beta_2^T)} + \epsilon}, \pm B\right)

    The paper has no growth :math:`\rho`, floor of v, bound B and lead d. Without them
    (`Compressed.published()`) and without bias correction it is the paper's. With
    growth, leaves that are exchanged exactly, whose momenta tell the mean gradients,
    stay Adam's: none of the parts is theirs, and their variances move on.

    Args:
      exchange: what workers do after the freeze with their momenta, such as
        `sign_mean('data')`.
      freeze: when the variance is frozen; not before the learning rate has risen,
        which nothing here can see. `onebit_adam` knows the learning rate, and warns.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the root of the variance.
      bias_correction: whether both moments are corrected for their start from
        zero. The variance's correction is frozen with it.
      warmup_exchange: what workers do with their gradients in the warm-up, such as
        `quantized_mean('data', 4)` for an eighth of the bytes; None for the exact
        mean.
      compressed: the parts of the compressed stage that are not in the paper.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with each
      worker's own gradients. Moments are float32 whatever the parameters are; updates
      have the gradients' dtype. `update` takes one extra argument, `stage`: None
      (default) compiles both stages into one program that chooses by the state.
      'warmup' or 'compressed' compiles one, which must be the state's next
      (`data_parallel` refuses another). One compressed step in `growth.period` measures
      the growth; its bytes are counted apart, as those of the stage
      'compressed/measuring'.

    Raises:
      TypeError: if an argument is not of its type, or an exchange returns votes.
      ValueError: if the exchanges' axes differ.

    Example:
      >>> import jax.numpy as jnp, onebit_jax, optax
      >>> tx = optax.chain(
      ...     scale_by_onebit_adam(
      ...         onebit_jax.sign_mean('data'), onebit_jax.freeze_at(1)
      ...     ),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> batch = jnp.array([[3.0, -5.0], [1.0, -1.0]])  # a line a worker
      >>> run = onebit_jax.simulated(lambda p, x: jnp.mean(x @ p), tx, workers=2)
      >>> params, state = run.init(jnp.zeros(2))
      >>> for _ in range(2):
      ...     params, state, loss = run.step(params, state, batch)
      >>> print(params.round(3))
      [-0.2  0.2]

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888,
      Algorithm 1.
    """
    check_parts("1-bit Adam", exchange, freeze)
    check_compressed(
        "1-bit Adam", compressed, has_only=("lead", "growth", "floor", "bound")
    )
    adam = _OnebitAdam(
        exchange=exchange,
        warmup_exchange=gradient_mean(warmup_exchange, exchange, "warmup_exchange"),
        freeze=freeze,
        b1=as_float32(b1),
        b2=as_float32(b2),
        eps=as_float32(eps),
        bias_correction=bias_correction,
        parts=compressed,
    )
    init: Any = adam.init
    freezing = Freezing(freeze, exchange, adam.norm, adam.frozen)
    update = freeze_then(adam.warmup, adam.compressed, freezing)
    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OnebitAdam:
    exchange: Exchange
    warmup_exchange: Exchange
    freeze: FreezeRule
    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    bias_correction: bool
    parts: Compressed

    def init(self, params: optax.Params) -> ScaleByOnebitAdamState:
        growth = self.parts.growth
        return ScaleByOnebitAdamState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=jnp.float32),
            nu=optax.tree.zeros_like(params, dtype=jnp.float32),
            frozen_at=jnp.zeros([], jnp.int32),
            floored=jnp.zeros([], jnp.float32),
            freeze=self.freeze.init(),
            growth=growth and growth.init(self.parted(params)[0]),
            exchange=self.exchange.init(params),
            warmup=self.warmup_exchange.init(params),
        )

    def warmup(
        self, gradients: optax.Updates, state: ScaleByOnebitAdamState, params: Any
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        """Adam on the mean of the gradients."""
        del params
        mean, exchanged = self.warmup_exchange.update(gradients, state.warmup)
        mean = optax.tree.cast(mean, jnp.float32)
        mu = optax.tree.update_moment(mean, state.mu, self.b1, 1)
        new_updates, nu = self.adam(mu, mean, state.nu, state.count)
        return new_updates, state._replace(mu=mu, nu=nu, warmup=exchanged)

    def adam(
        self,
        mu: optax.Params,
        mean: optax.Updates,
        nu: optax.Params,
        count: Int32[Array, ""],
    ) -> tuple[optax.Updates, optax.Params]:
        """Adam's updates, and the variances with the mean gradients added."""
        nu = optax.tree.update_moment_per_elem_norm(mean, nu, self.b2, 2)
        return self.ratio(self.corrected(mu, self.b1, count), nu, count), nu

    def norm(self, state: ScaleByOnebitAdamState) -> Any:
        """The 1-norm of the variance."""
        return self.corrected(optax.tree.sum(state.nu), self.b2, state.count)

    def frozen(self, state: ScaleByOnebitAdamState) -> ScaleByOnebitAdamState:
        """The variance frozen, and its growth begun."""
        (nu, exact), growth = self.parted(state.nu), state.growth
        if self.parts.growth is not None and growth is not None:
            growth = self.parts.growth.freeze(nu, growth)
        nu, floored = self.parts.raised(nu)
        return state._replace(
            nu=_joined(nu, exact),
            floored=floored,
            growth=growth,
            frozen_at=state.count,
        )

    def compressed(
        self, gradients: optax.Updates, state: ScaleByOnebitAdamState, params: Any
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        """A step by the exchanged momentum and the frozen variance."""
        del params
        mu, exchanged = self.exchange.exchange_momentum(
            gradients, state.mu, self.b1, state.exchange
        )
        if self.parts.lead is not None:
            mu = _in_place_of(state.mu, mu, state.count)
        (now, last, nu), (exact_now, exact_last, exact_nu) = self.parted(
            (mu, state.mu, state.nu)
        )
        grown, growth = self.grown(nu, gradients, mu, state)
        direction = self.led(now, last, state.count)
        compressed = self.parts.cut(self.ratio(direction, grown, state.frozen_at))
        # Their momenta tell the mean gradients.
        mean = jax.tree.map(
            lambda m, before: (m - self.b1 * before) / (1 - self.b1),
            exact_now,
            exact_last,
        )
        exact, exact_nu = self.adam(exact_now, mean, exact_nu, state.count)
        return _joined(compressed, exact), state._replace(
            mu=mu, nu=_joined(nu, exact_nu), growth=growth, exchange=exchanged
        )

    def parted(self, tree: Any) -> tuple[Any, Any]:
        """The leaves that the compressed stage is for, and those that stay Adam's.

        The second are those that are exchanged exactly, where there is a growth; in the
        papers all variances are frozen.
        """

        def is_exact(x: Array) -> bool:
            return self.parts.growth is not None and self.exchange.is_exact(x.shape)

        return (
            jax.tree.map(lambda x: None if is_exact(x) else x, tree),
            jax.tree.map(lambda x: x if is_exact(x) else None, tree),
        )

    def corrected(
        self, moment: optax.Params, decay: ArrayLike, steps: Int32[Array, ""]
    ) -> optax.Params:
        """A moment corrected for its start from zero, if bias correction is on."""
        if not self.bias_correction:
            return moment
        return divide_by_weight(moment, decay, steps)

    def led(
        self, mu: optax.Params, last: optax.Params, count: Int32[Array, ""]
    ) -> optax.Params:
        """The corrected momentum, extrapolated by the lead."""
        now = self.corrected(mu, self.b1, count)
        if self.parts.lead is None:
            return now
        # Corrected before they are compared: a rise from zero is no lag.
        before = self.corrected(last, self.b1, jnp.maximum(count - 1, 1))
        lead = jnp.asarray(self.parts.lead, jnp.float32)
        return jax.tree.map(lambda m, earlier: m + lead * (m - earlier), now, before)

    def ratio(
        self, mu: optax.Params, nu: optax.Params, steps: Int32[Array, ""]
    ) -> optax.Updates:
        """A corrected momentum over the root of a variance from so many steps."""
        nu = self.corrected(nu, self.b2, steps)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + self.eps), mu, nu)

    def grown(
        self,
        nu: optax.Params,
        gradients: optax.Updates,
        mu: optax.Params,
        state: ScaleByOnebitAdamState,
    ) -> tuple[optax.Params, GrowthState | None]:
        """The frozen variances with their growth so far, which gradients add to.

        Their sums are exchanged after the momentum.
        """
        rule, growth = self.parts.growth, state.growth
        if rule is None or growth is None:
            return nu, growth
        growth = rule.follow(
            self.parted(gradients)[0],
            growth,
            decay=self.b2,
            count=ordered_after(state.count, mu),
            axes=self.exchange.axes,
        )
        measured = rule.period * growth.measured
        now, frozen = (
            weight(self.b2, steps) if self.bias_correction else 1
            for steps in (state.frozen_at + measured, state.frozen_at)
        )
        grown = rule.grow(nu, growth, weight_now=now, weight_frozen=frozen)
        return grown, growth


def _in_place_of(
    old: optax.Params, new: optax.Params, count: Int32[Array, ""]
) -> optax.Params:
    """New values that on a GPU take the memory of the old ones, which are read beside.

    One kernel reads the old values, writes the new and updates by both, where the new
    ones are computed from the old in XLA's eyes. Else it writes them elsewhere, and
    they are copied.
    """

    def or_never_the_old(old: Any, new: Any, count: Array) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(count < 0, x, y), old, new)

    return lax.platform_dependent(
        old, new, count, cpu=lambda old, new, count: new, default=or_never_the_old
    )


def _joined(tree: Any, other: Any) -> Any:
    """The leaves of two trees, each of which has None in the place of the other's."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, tree, other, is_leaf=lambda x: x is None
    )


def onebit_adamw(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    freeze: FreezeRule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    bias_correction: bool = True,
    warmup_exchange: Exchange | None = None,
    compressed: Compressed = _PARTS,
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit Adam with decoupled weight decay.

    .. math:: p_t = p_{t-1} - \alpha_t (u_t + \lambda p_{t-1})

    with :math:`u_t` of `scale_by_onebit_adam`. Before the freeze it is
    `optax.adamw` on the exact mean of the workers' gradients.

    Args:
      learning_rate: a number, or a schedule from the step.
      exchange: what workers do after the freeze with their momenta, such as
        `onebit_jax.sign_mean('data')`.
      freeze: when the variance is frozen, such as `onebit_jax.freeze_at(1000)`.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the root of the variance.
      weight_decay: λ. As in `optax.adamw`, it is multiplied by the learning rate.
      mask: a tree of booleans like the parameters', or a function from parameters
        to one, that says which leaves decay; None for all.
      bias_correction: whether both moments are corrected for their start from zero.
      warmup_exchange: what workers do with their gradients in the warm-up; None for
        the exact mean.
      compressed: the parts of the compressed stage that are not in the paper;
        `onebit_jax.Compressed.published()` leaves them out.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with
      each worker's own gradients and the parameters; `onebit_jax.data_parallel` does
      so.

    Raises:
      TypeError, ValueError: as `scale_by_onebit_adam` does.

    Warns:
      UserWarning: if the variance may be frozen while the learning rate still rises.

    Example:
      >>> import onebit_jax
      >>> tx = onebit_jax.onebit_adamw(
      ...     4e-4,
      ...     onebit_jax.sign_mean('data'),
      ...     onebit_jax.freeze_at(20_000),
      ...     weight_decay=0.01,
      ... )

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888,
      Algorithm 1; Loshchilov and Hutter, Decoupled weight decay regularization, 2019,
      https://arxiv.org/abs/1711.05101.
    """
    rescale = scale_by_onebit_adam(
        exchange,
        freeze,
        b1,
        b2,
        eps,
        bias_correction=bias_correction,
        warmup_exchange=warmup_exchange,
        compressed=compressed,
    )
    warn_if_rising(learning_rate, freeze)
    return optax.chain(
        rescale,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def onebit_adam(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    freeze: FreezeRule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    bias_correction: bool = True,
    warmup_exchange: Exchange | None = None,
    compressed: Compressed = _PARTS,
) -> optax.GradientTransformationExtraArgs:
    """1-bit Adam: `onebit_adamw` without weight decay.

    Args:
      learning_rate: a number, or a schedule from the step.
      exchange: what workers do after the freeze with their momenta, such as
        `onebit_jax.sign_mean('data')`.
      freeze: when the variance is frozen, such as `onebit_jax.freeze_at(1000)`.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the root of the variance.
      bias_correction: as of `onebit_adamw`.
      warmup_exchange: as of `onebit_adamw`.
      compressed: as of `onebit_adamw`.

    Returns:
      A transformation, as of `onebit_adamw`.

    Raises:
      TypeError, ValueError: as `scale_by_onebit_adam` does.

    Warns:
      UserWarning: if the variance may be frozen while the learning rate still rises.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.onebit_adam(
      ...     0.1, onebit_jax.sign_mean('data'), onebit_jax.freeze_at(5)
      ... )
      >>> def loss_fn(p, x):
      ...     return jnp.mean((x @ (p - 1)) ** 2)
      >>> run = onebit_jax.data_parallel(loss_fn, tx, mesh)
      >>> params, state = run.init(jnp.zeros(2))
      >>> for _ in range(30):
      ...     params, state, loss = run.step(params, state, jnp.ones((1, 2)))
      >>> print(loss < 0.2)
      True

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888,
      Algorithm 1.
    """
    rescale = scale_by_onebit_adam(
        exchange,
        freeze,
        b1,
        b2,
        eps,
        bias_correction=bias_correction,
        warmup_exchange=warmup_exchange,
        compressed=compressed,
    )
    warn_if_rising(learning_rate, freeze)
    return optax.chain(rescale, optax.scale_by_learning_rate(learning_rate))
