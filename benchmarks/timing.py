"""Seconds of calls."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def seconds(
    call: Callable[[], Any], wait: Callable[[Any], Any], calls: int = 1
) -> float:
    """Seconds of a call, of some that are started one after another.

    Args:
      call: Starts the work.
      wait: Waits for a call's result, and gives it back.
      calls: How many are started and waited for together.

    Returns:
      The mean.
    """
    start = time.perf_counter()
    for _ in range(calls - 1):
        call()
    # Its buffers are given back when the clock has stopped.
    last = wait(call())
    taken = time.perf_counter() - start
    del last
    return taken / calls
