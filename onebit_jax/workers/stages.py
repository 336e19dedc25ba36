"""Stages: named parts of a run that do, and exchange, different things."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from jax import lax

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from jax import Array
    from jaxtyping import Bool, Int32

Result = TypeVar("Result")

_SCOPE = re.compile(r"\bstage:(\w+)")
_BRANCH = re.compile(r"\bbranch_(\d+)_fun/stage:(\w+)")


def run_stage(
    stages: Mapping[str, Callable[[], Result]],
    current: Int32[Array, ""],
    stage: str | None = None,
) -> Result:
    """Runs one of several stages, each in a scope of its own name.

    `onebit_jax.traffic` finds the scopes in the compiled program and counts each
    stage's bytes apart.

    Args:
      stages: for each stage's name, its function; all return the same types.
      current: place of the stage to run, by the state; the same on all workers.
      stage: name of the stage to run whatever the state says, so that the program
        has no other; None to choose by `current` when it runs.

    Returns:
      What the stage returns.

    Raises:
      ValueError: if there is no such stage.

    Example:
      >>> import jax.numpy as jnp
      >>> stages = {'warmup': lambda: jnp.int32(1), 'compressed': lambda: jnp.int32(2)}
      >>> run_stage(stages, jnp.int32(1)), run_stage(stages, jnp.int32(1), 'warmup')
      (Array(2, dtype=int32), Array(1, dtype=int32))
    """
    if stage is not None and stage not in stages:
        raise ValueError(
            f"stage must be None or one of {', '.join(map(repr, stages))}, got "
            f"{stage!r}."
        )

    if stage is not None:
        return _scoped(stage, stages[stage])()
    branches: list[Any] = [_scoped(*each) for each in stages.items()]
    if len(branches) == 2:
        return lax.cond(current > 0, branches[1], branches[0])
    return lax.switch(current, branches)


def run_nested_stage(
    name: str,
    happens: Bool[Array, ""],
    then: Callable[[], Result],
    otherwise: Callable[[], Result],
) -> Result:
    """Runs what only some steps of a stage do, in a scope inside the stage's.

    Their bytes are counted apart, as those of the stage 'compressed/NAME', which sends
    what 'compressed' sends, and more.

    Args:
      name: of the stage inside the stage.
      happens: whether this step does; the same on all workers.
      then: what it does.
      otherwise: what other steps do, without any collective.

    Returns:
      What the one or the other returns, of the same types.

    Example:
      >>> import jax.numpy as jnp
      >>> run_nested_stage('measuring', jnp.bool(True), lambda: jnp.int32(1),
      ...               lambda: jnp.int32(0))
      Array(1, dtype=int32)
    """
    return lax.cond(happens, _scoped(name, then), otherwise)


def _scoped(name: str, function: Callable[[], Result]) -> Callable[[], Result]:
    def run() -> Result:
        with jax.named_scope(f"stage:{name}"):
            return function()

    return run


def branches_in(name_stacks: Iterable[str]) -> dict[str, int]:
    """Each stage's branch number in the conditional that chooses between stages."""
    matches = [match for stack in name_stacks for match in _BRANCH.findall(stack)]
    return {stage: int(branch) for branch, stage in matches}


def stage_of(name_stack: str) -> str | None:
    """The stage whose scope a name stack is in, with those around it; None for none."""
    return "/".join(dict.fromkeys(_SCOPE.findall(name_stack))) or None
