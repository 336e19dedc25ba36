"""An exchange on one device that does the work of one worker of several.

In the product, a worker that is alone encodes nothing and its optimizer never freezes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import onebit_jax
from onebit_jax.exchanges.two_phase import TwoPhase


@dataclass(frozen=True, kw_only=True)
class OneOfMany(TwoPhase):
    """An exchange whose only worker encodes as one of many does."""

    def is_alone(self) -> bool:
        """False, so that it encodes, and an optimizer freezes its variance."""
        return False


def one_of_many(axis: str, **options: Any) -> OneOfMany:
    """`sign_mean` of a worker that encodes although it is alone.

    Args:
      axis: The mesh's axis, of one device.
      options: Those of `sign_mean`.

    Returns:
      The exchange; its worker averages all blocks, where one of n averages a share.
    """
    signs = onebit_jax.sign_mean(axis, **options)
    assert isinstance(signs, TwoPhase)
    return OneOfMany(**{f.name: getattr(signs, f.name) for f in fields(signs)})
