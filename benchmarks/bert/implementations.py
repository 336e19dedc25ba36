"""The implementations of BERT that are timed in turn."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.bert.hugging_face import HuggingFace
from benchmarks.bert.programs import (
    make_batch,
    model_config,
    programs,
    step_optimizer,
)
from models import SIZES
from train.bert.objective import init_params
from train.core.mesh import AXIS, make_mesh
from train.plan.gpu_program import needed_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.bert.config import Config
    from benchmarks.bert.programs import Shape

OURS, EAGER, COMPILED = "onebit-jax", "transformers", "transformers, torch.compile"


@dataclass
class Implementation:
    """One implementation's programs, ready to be called.

    Attributes:
      name: Its name.
      attention: Its attention.
      remat: Its policy of recomputing for the backward pass.
      predictions: Positions of a sequence that are projected to the vocabulary.
      calls: Functions that start each program, by its name.
      wait: A function that waits for a call's result.
      held_bytes: Memory that each program needs, where known.
    """

    name: str
    attention: str
    remat: str
    predictions: int
    calls: dict[str, Callable[[], Any]]
    wait: Callable[[Any], Any]
    held_bytes: dict[str, int]


class Training:
    """Parameters and optimizer state of a model, which all its variants share.

    Args:
      config: The flags.
      shape: The size of the computation.
      names: The programs that are wanted: forward, gradients, step.
    """

    def __init__(self, config: Config, shape: Shape, names: tuple[str, ...]):
        self.config, self.shape, self.names = config, shape, names
        self.mesh = make_mesh(1)
        self.tx = step_optimizer(config.optimizer)
        batch = make_batch(SIZES[shape.model], shape)
        split = NamedSharding(self.mesh, PartitionSpec(AXIS))
        self.batch = jax.device_put(batch, split)
        # A forward pass keeps nothing to recompute from: one for all policies.
        self.forward = functools.cache(self._forward)
        self.params = self.state = None

    def implementation(self, attention: str, remat: str) -> Implementation:
        """Compiles the programs of a variant.

        Raises:
          ValueError: Its parts do not go together, or not here.
          RuntimeError: It does not compile, or what it holds does not fit.
        """
        model = model_config(self.shape, attention, remat, scan=self.config.scan)
        made = programs(model, self.tx, self.mesh)
        if self.params is None or jax.tree.leaves(self.params)[0].is_deleted():
            params = init_params(model, 0)
            self.params, self.state = made.init(params)
        compiled = {}
        for name in self.names:
            if name == "forward":
                compiled[name] = self.forward(attention)
                continue
            state = (self.state,) if name == "step" else ()
            function = getattr(made, name)
            args = self.params, *state, self.batch, np.uint32(0)
            compiled[name] = function.lower(*args).compile()
        needed = {
            name: needed_memory(program)["together"]
            for name, program in compiled.items()
        }
        self._check_memory(max(needed.values()))
        return Implementation(
            OURS,
            attention,
            remat,
            self.shape.predictions,
            {name: self._call(name, program) for name, program in compiled.items()},
            jax.block_until_ready,
            needed,
        )

    def _forward(self, attention: str) -> Any:
        model = model_config(self.shape, attention, "none", scan=self.config.scan)
        function = programs(model, self.tx, self.mesh).forward
        return function.lower(self.params, self.batch, np.uint32(0)).compile()

    def _call(self, name: str, program: Any) -> Callable[[], Any]:
        def call() -> Any:
            return program(self.params, self.batch, np.uint32(0))

        def step() -> Any:
            self.params, self.state, loss = program(
                self.params, self.state, self.batch, np.uint32(0)
            )
            return loss

        return step if name == "step" else call

    def _check_memory(self, needed: int) -> None:
        stats = jax.devices()[0].memory_stats()
        if stats and needed > stats["bytes_limit"]:
            raise RuntimeError(
                f"needs {needed / 1e9:.1f} GB of the {stats['bytes_limit'] / 1e9:.1f} "
                "that JAX may take"
            )


def of_hugging_face(
    shape: Shape, platform: str, names: tuple[str, ...], forms: Sequence[str]
) -> list[Implementation]:
    """Hugging Face's model, eager and compiled.

    Args:
      shape: The size of the computation.
      platform: JAX's name of the platform.
      names: The programs that are wanted.
      forms: Of 'eager' and 'compiled' those that are wanted.

    Returns:
      An implementation for each form; all have the same parameters.
    """
    model = model_config(shape, "xla", "none", scan=False)
    torch_model = HuggingFace(model, shape, platform)
    made = []
    for form, name in (("eager", EAGER), ("compiled", COMPILED)):
        if form not in forms:
            continue
        calls = torch_model.calls(compiled=form == "compiled")
        wanted = {key: calls[key] for key in names}
        # It projects every position.
        made.append(
            Implementation(
                name, "sdpa", "none", shape.length, wanted, torch_model.wait, {}
            )
        )
    return made
