"""Lines for the user, which one process of many prints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax

_COMMANDS = Path(__file__).parents[1]


def is_main_process() -> bool:
    """True in the one process of many that writes and draws."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Prints a line, on one process of many."""
    if is_main_process():
        print(text, flush=True)


def say_warnings() -> None:
    """Prints the warnings that the commands cause as a line each, as `say` does.

    Those of other libraries stay as Python prints them, with their place.
    """
    otherwise = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        *place: Any,
        **more: Any,
    ) -> None:
        if category is UserWarning and Path(filename).is_relative_to(_COMMANDS):
            say(f"warning: {message}")
        else:
            otherwise(message, category, filename, *place, **more)

    warnings.showwarning = show
