"""Differences between the supported versions of JAX."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

# From 0.11 on a kernel refuses a Ref whose type varies over a mesh axis.
REFS_MAY_VARY = jax.__version_info__ < (0, 11)


def interpret_parameters() -> Any:
    """The parameters by which a Mosaic GPU kernel runs interpreted on a CPU."""
    exported = getattr(plgpu, "InterpretGPUParams", None)
    if exported is not None:
        return exported()
    # Not exported before 0.11.2.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()
