"""The device that is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from benchmarks.on_gpu.sizes import Sizes


def device(sizes: Sizes) -> Any:
    """The device.

    Raises:
      SystemExit: It is not of the platform that the sizes are for.
    """
    found = jax.devices()[0]
    if found.platform != sizes.platform:
        raise SystemExit(
            f"JAX sees no {sizes.platform} but {found.platform}: install jax[cuda13], "
            "or give --tiny on a CPU."
        )
    return found
