"""Lines for the user, which one process of many prints."""

from __future__ import annotations

import jax


def is_main_process() -> bool:
    """True in the one process of many that writes and draws."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Prints a line, on one process of many."""
    if is_main_process():
        print(text, flush=True)
