"""The device that is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from benchmarks.on_gpu.record import read

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.on_gpu.sizes import Sizes


def device(sizes: Sizes, folder: Path) -> Any:
    """The device.

    Args:
      sizes: The sizes.
      folder: That of the run.

    Raises:
      SystemExit: It is not of the platform that the sizes are for, or of another kind
        than the one that the folder's results are of.
    """
    found = jax.devices()[0]
    if found.platform != sizes.platform:
        raise SystemExit(
            f"JAX sees no {sizes.platform} but {found.platform}: install jax[cuda13], "
            "or give --tiny on a CPU."
        )
    earlier = read(folder, "facts").get("device_kind", found.device_kind)
    if found.device_kind != earlier:
        raise SystemExit(
            f"{folder} holds what was found on {earlier}, and this is "
            f"{found.device_kind}: give --out another folder."
        )
    return found
