"""A word about a coordinator that does not answer."""

from __future__ import annotations

import socket
import threading
import time

from onebit_launch.output import say

_PATIENCE = 20.0
"""Seconds in which a coordinator may be silent before it is told of."""


class Lookout(threading.Thread):
    """A thread that says, once, that the coordinator does not answer.

    JAX waits for it in silence, for five minutes.

    Args:
      coordinator: its HOST:PORT.
      patience: seconds before it is said.
    """

    def __init__(self, coordinator: str, patience: float = _PATIENCE):
        super().__init__(daemon=True)
        self._coordinator, self._patience = coordinator, patience

    def run(self) -> None:
        """Asks until something answers, or it has been said why nothing does."""
        name, _, port = self._coordinator.rpartition(":")
        host = name.strip("[]")
        try:
            socket.getaddrinfo(host, port)
        except socket.gaierror as error:
            say(
                f"{host} is not known here ({error.strerror}); if it is not to be "
                "known soon, give all hosts an address or a name that all of them know."
            )
            return
        deadline = time.monotonic() + self._patience
        while reason := _silence(host, int(port)):
            if time.monotonic() >= deadline:
                say(
                    f"nothing answers at {self._coordinator} yet ({reason}), as while "
                    "the script there still imports; if that goes on, see that it is "
                    "an address of --host 0, that the launcher runs there, and that "
                    "its script calls jax.distributed.initialize()."
                )
                return
            time.sleep(min(1.0, self._patience))


def _silence(host: str, port: int) -> str | None:
    """Why nothing answers at an address; None where something does."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
