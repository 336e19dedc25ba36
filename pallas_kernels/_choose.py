"""Which implementation of the operations computes, and whether it can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import jax

if TYPE_CHECKING:
    from types import ModuleType

    from jax import Array

Implementation = Literal["xla", "mosaic", "mosaic_interpreted"]

_HOPPER = 9

_MOSAIC: dict[str, frozenset[str]] = {}
"""What None takes Mosaic's form for: from the kind of a GPU, as JAX names it, to the
operations of which `benchmarks.on_gpu` has found that form right there and at least as
fast as XLA's. No GPU has been measured: today None takes XLA's form everywhere."""


def check_name(implementation: str | None) -> None:
    """Refuses a name that is no implementation's.

    Args:
      implementation: the name, or None for the one that is chosen here.

    Raises:
      ValueError: if it is neither None nor one of `Implementation`.
    """
    names = get_args(Implementation)
    if implementation is not None and implementation not in names:
        raise ValueError(
            f"implementation must be None or one of {', '.join(names)}, got "
            f"{implementation!r}."
        )


def mosaic(
    implementation: Implementation | None, operation: str, x: Array
) -> ModuleType | None:
    """The Mosaic kernels, if they are to compute on an array.

    Args:
      implementation: the implementation asked for; None for what `_MOSAIC` says,
        today XLA for every operation on every device.
      operation: the function of `pallas_kernels` that asks.
      x: an array of the program, whose type tells what it is compiled for.

    Returns:
      The module of the kernels, or None for XLA.

    Raises:
      ValueError: if there is no such implementation, or it cannot run there.
    """
    check_name(implementation)
    # An empty table needs no device: to ask for one may start JAX's backend.
    if implementation is None and _MOSAIC and operation in _MOSAIC.get(_kind(x), ()):
        implementation = "mosaic"
    if implementation == "mosaic":
        _check_hopper(x)
    if implementation in (None, "xla"):
        return None
    # Imported where it is used: the backend is experimental, and large.
    from pallas_kernels import _mosaic

    return _mosaic


def _kind(x: Array) -> str:
    """The kind of the device that a program is compiled for."""
    device = jax.typeof(x).sharding.mesh.abstract_device
    return device.device_kind if device else jax.devices()[0].device_kind


def _check_hopper(x: Array) -> None:
    device = jax.typeof(x).sharding.mesh.abstract_device
    # Without a mesh a program runs on the default device.
    platform = device.platform if device else jax.default_backend()
    capability = None
    if platform == "gpu" and jax.default_backend() == "gpu":
        capability = getattr(jax.devices()[0], "compute_capability", None)
    # AMD's GPUs have names there, such as gfx942.
    major = str(capability).partition(".")[0]
    too_old = capability is not None and not (
        major.isdecimal() and int(major) >= _HOPPER
    )
    if platform != "gpu" or too_old:
        where = f"a GPU of compute capability {capability}" if too_old else platform
        raise ValueError(
            "implementation 'mosaic' needs an NVIDIA GPU of compute capability 9.0 or "
            f"later and this program is compiled for {where}: use 'xla' (or "
            "'mosaic_interpreted', slow, in tests)."
        )
