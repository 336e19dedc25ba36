"""XLA's compiler for NVIDIA GPUs, on a machine without any.

XLA must be told before jax is imported that there is no driver and nothing to tune on,
so that what compiles is a module with a process of its own: `run` starts it, and it
calls `serve`.

References:
  https://docs.jax.dev/en/latest/aot.html
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import topologies

from train.core.errors import InputError
from train.plan.targets import GPUS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax.sharding import Mesh

INSTALL = (
    "--compile needs XLA's compiler for NVIDIA GPUs, but no GPU: pip install --no-deps "
    "jax-cuda13-plugin=={0} jax-cuda13-pjrt=={0} nvidia-cuda-nvcc nvidia-nvvm "
    "nvidia-cuda-crt nvidia-cuda-runtime (700 MB)."
)


def check_installed() -> None:
    """Refuses to go on without the compiler.

    Raises:
      InputError: It is missing; with what to install.
    """
    parts = "jax_plugins", "jax_plugins.xla_cuda13"
    if not all(importlib.util.find_spec(part) for part in parts):
        raise InputError(INSTALL.format(jax.__version__))


def run(module: str, config: Any) -> Any:
    """Runs a module that compiles, in a process that knows of no GPU.

    Args:
      module: Its name; its `__main__` calls `serve`.
      config: A dataclass of JSON values; paths are left out, as it writes no files.

    Returns:
      The JSON value that it gives.

    Raises:
      InputError: It does not compile; XLA's message, if any, is on the standard error.
    """
    values = dataclasses.asdict(config).items()
    given = json.dumps({k: v for k, v in values if not isinstance(v, Path)})
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    environment = os.environ | {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": flags.strip(),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compiled.json")
        command = [sys.executable, "-m", module, given, str(file)]
        status = subprocess.run(command, env=environment, check=False).returncode
        if status:
            why = "what XLA said is above"
            if status < 0:
                why = f"the compiler was killed by {signal.Signals(-status).name}"
            raise InputError(
                f"it does not compile ({why}); where memory did not suffice, give "
                "fewer GPUs, a smaller --batch or --remat."
            )
        return json.loads(file.read_text(encoding="utf-8"))


def serve(config_type: type, compile_config: Callable[[Any], Any]) -> None:
    """The process that `run` starts.

    Args:
      config_type: The dataclass that was given to `run`.
      compile_config: From such a config to the JSON value that `run` returns.
    """
    given, file = sys.argv[1:]
    value = compile_config(config_type(**json.loads(given)))
    Path(file).write_text(json.dumps(value), encoding="utf-8")


def make_mesh(gpu: str, axis_sizes: Mapping[str, int]) -> Mesh:
    """A mesh of GPUs that are not there.

    Args:
      gpu: A name of `train.plan.targets.GPUS` that XLA can compile for.
      axis_sizes: From an axis' name to its size: hosts and then GPUs of each, or GPUs
        alone.

    Returns:
      The mesh.
    """
    shape = tuple(axis_sizes.values())
    hosts, gpus = shape if len(shape) == 2 else (1, *shape)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=GPUS[gpu].target,
        topology=f"1x{hosts}x{gpus}",
    )
    return topologies.make_mesh(topology, shape, tuple(axis_sizes))
