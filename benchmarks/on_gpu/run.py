"""Runs the parts, each in a process of its own and no longer than its share."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.on_gpu.part import read, write

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]


class Part(NamedTuple):
    """A part.

    Attributes:
      name: Name of its module in `benchmarks.on_gpu`, whose `measure` is run.
      seconds: Its share of the time, where all parts' are added up.
      needs: Packages beside jax, optax and NumPy.
    """

    name: str
    seconds: int
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        needed = ("jax", "optax", *self.needs)
        return [name for name in needed if importlib.util.find_spec(name) is None]


PARTS = (
    # Most of its share is for a cold start; what is left goes to the others.
    Part("facts", 40),
    Part("right", 90, ("pytest", "hypothesis")),
    Part("fast", 70),
    Part("optimizer", 90, ("flax", "tokenizers")),
    Part("model", 90, ("flax", "tokenizers")),
)
"""In order of worth."""


def run(
    parts: Sequence[Part], folder: Path, minutes: float, *, tiny: bool
) -> dict[str, Any]:
    """Runs parts one after another, in so many minutes together.

    Returns:
      How each ended, as in `run.json`, where those of earlier calls are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = read(folder, "run")
    for part in parts:
        if part.missing:
            _say(f"{part.name}: left out, {' and '.join(part.missing)} not installed")
    end = time.monotonic() + 60 * minutes
    ends: dict[str, Any] = {}
    for number, part in enumerate(parts):
        shares = [each.seconds for each in parts[number:] if not each.missing]
        left = end - time.monotonic()
        if part.missing:
            ends[part.name] = {"end": "left out", "missing": part.missing}
        else:
            share = left * part.seconds / sum(shares)
            ends[part.name] = _run_part(part, folder.resolve(), share, tiny)
            about = ends[part.name]
            said = f": {about['said']}" if "said" in about else ""
            _say(f"{part.name}: {about['end']} in {about['seconds']:.0f} s{said}")
        write(folder / "run.json", earlier | ends)
    return ends


def _say(line: str) -> None:
    print(line, flush=True)


def command(part: Part, folder: Path, tiny: bool) -> list[str]:
    """The command line of a part's process."""
    given = part.name, str(folder), "tiny" * tiny
    return [sys.executable, "-m", "benchmarks.on_gpu.part", *given]


def _run_part(part: Part, folder: Path, seconds: float, tiny: bool) -> dict[str, Any]:
    log = folder / f"{part.name}.log"
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command(part, folder, tiny),
            env=os.environ | _environment(folder, tiny),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # What it has started may still be on the GPU.
            _end(process)
    about: dict[str, Any] = {
        "seconds": time.monotonic() - begun,
        "share_seconds": seconds,
    }
    if status == 0:
        return {"end": "done", **about}
    if status is None:
        said = f"was killed at the end of its share, {seconds:.0f} s"
        return {"end": "cut", **about, "said": said}
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "nothing said")
    said = f"{last.strip()} ({log.name}, status {status})"
    return {"end": "failed", **about, "said": said}


def _environment(folder: Path, tiny: bool) -> dict[str, str]:
    """The variables of a part's process."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    common = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # The log of a part that hangs, or crashes, ends with where it was.
        "PYTHONFAULTHANDLER": "1",
        # All at once: memory that JAX takes as it needs it comes in regions of doubled
        # size, of which it gives none back. The step of 128 tokens, 21 GB, would leave
        # that of 512, 36 GB in one piece, no room in 80 GB.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "XLA_CLIENT_MEM_FRACTION": "0.9",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    # Compiling is most of what small sizes take.
    small = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return common | (small if tiny else {})


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, which then says where it was, and all that it has started."""
    for how in (signal.SIGABRT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        # A driver that hangs may hold it: the next part goes on all the same.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
            if how == signal.SIGKILL:
                return
