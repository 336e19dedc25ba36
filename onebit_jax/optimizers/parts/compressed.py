"""The parts of steps after the freeze that are in no paper."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import optax

from onebit_jax.optimizers.parts.growth import GrowthByMeanSquares

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32


@dataclasses.dataclass(frozen=True)
class FloorAtMean:
    """Raises negligible variances to their leaf's mean when they are frozen.

    A sign cannot say zero: a coordinate whose frozen variance is zero, because it had
    no gradient yet, would move by its scale / eps.

    Attributes:
      negligible: variances below this share of their leaf's mean are raised.

    Raises:
      ValueError: if the share is not from 0 to below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> raised, share = FloorAtMean().apply(jnp.array([0.0, 2.0]))
      >>> print(raised, share)
      [1. 2.] 0.5
    """

    negligible: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 <= self.negligible < 1:
            raise ValueError(
                f"negligible must be a share from 0 to below 1, got {self.negligible}."
            )

    def apply(self, nu: optax.Params) -> tuple[optax.Params, Float32[Array, ""]]:
        """The variances with the negligible ones raised.

        Args:
          nu: variances.

        Returns:
          The variances, and the share of them that was raised.
        """
        means = jax.tree.map(lambda v: jnp.sum(v) / float(max(v.size, 1)), nu)
        low = jax.tree.map(lambda v, mean: v < self.negligible * mean, nu, means)
        raised = jax.tree.map(
            lambda v, is_low, mean: jnp.where(is_low, mean, v), nu, low, means
        )
        size = max(sum(v.size for v in jax.tree.leaves(nu)), 1)
        number = sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(low))
        return raised, jnp.asarray(number / float(size), jnp.float32)


_GROWTH, _FLOOR = GrowthByMeanSquares(), FloorAtMean()


@dataclasses.dataclass(frozen=True)
class Compressed:
    r"""The parts of steps with a frozen variance that are in no paper.

    Attributes:
      lead: d, the steps by which a momentum is extrapolated, :math:`\hat m_t +
        d (\hat m_t - \hat m_{t-1})`, as the exchange's error feedback delays it. d =
        b1 is Nesterov's momentum. More than the default without a bound has diverged.
        The default is the best of those tried in docs/studies/decoder.md.
      growth: of gradients that grow after the freeze and would otherwise raise the
        learning rate with them.
      floor: what becomes of variances near zero at the freeze. Without it, and without
        a bound, values that had no gradients in the warm-up, such as positions beyond
        its sequences, have a step of the scale / eps.
      bound: the largest update of a coordinate. A sign cannot say how small a value
        is: where a block holds coordinates of very different variances, those of the
        smallest get the largest updates. Adam's own are at most
        :math:`(1-\beta_1)/\sqrt{(1-\beta_2)(1-\beta_1^2/\beta_2)}`, 7.3 with the
        default decays, and usually at most 1.

    None leaves a part out.

    Raises:
      TypeError: if growth or floor is not of its type.
      ValueError: if the lead is negative or not finite, or the bound is not more
        than 0.

    Example:
      >>> import onebit_jax
      >>> tx = onebit_jax.onebit_adam(
      ...     1e-3, onebit_jax.sign_mean('data'), onebit_jax.freeze_at(1000),
      ...     compressed=Compressed(growth=None))
    """

    lead: ArrayLike | None = 1.14
    growth: GrowthByMeanSquares | None = _GROWTH
    floor: FloorAtMean | None = _FLOOR
    bound: ArrayLike | None = 3.0

    def __post_init__(self) -> None:
        for name, kind in (("growth", GrowthByMeanSquares), ("floor", FloorAtMean)):
            part = getattr(self, name)
            if part is not None and not isinstance(part, kind):
                raise TypeError(
                    f"{name} must be a {kind.__name__} or None, got {part!r}."
                )
        lead, bound = self.lead, self.bound
        if isinstance(lead, (int, float)) and not 0 <= lead < math.inf:
            raise ValueError(
                f"lead must be a finite number of steps from 0 on, or None, got {lead}."
            )
        if isinstance(bound, (int, float)) and not bound > 0:
            raise ValueError(
                f"bound must be more than 0, or None for none, got {bound}."
            )

    @classmethod
    def published(cls) -> Self:
        """None of the parts: momentum and frozen variance alone, as in the papers."""
        return cls(lead=None, growth=None, floor=None, bound=None)

    def raised(self, nu: optax.Params) -> tuple[optax.Params, Float32[Array, ""]]:
        """Variances that are being frozen, and the share that the floor raised."""
        if self.floor is None:
            return nu, jnp.zeros([], jnp.float32)
        return self.floor.apply(nu)

    def cut(self, updates: optax.Updates, times: int = 1) -> optax.Updates:
        """Updates cut to a multiple of the bound."""
        if self.bound is None:
            return updates
        limit = times * jnp.asarray(self.bound, jnp.float32)
        return optax.tree.clip(updates, -limit, limit)


def check_compressed(who: str, compressed: Any, *, has_only: tuple[str, ...]) -> None:
    """Refuses what is no `Compressed`, or has parts that an optimizer does not.

    Args:
      who: the optimizer's name.
      compressed: the argument.
      has_only: the names of the parts that the optimizer has.

    Raises:
      TypeError: if it is another type.
      ValueError: if another part is given.
    """
    if not isinstance(compressed, Compressed):
        raise TypeError(
            "compressed must be a Compressed, such as Compressed.published(), got "
            f"{compressed!r}."
        )
    for field in dataclasses.fields(compressed):
        if field.name not in has_only and getattr(compressed, field.name) is not None:
            raise ValueError(
                f"{who} has no {field.name}: give Compressed({field.name}=None, ...)."
            )
