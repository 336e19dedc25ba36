"""How a process ends for what a user can put right, or for another process's sake."""

LOST_EXIT = 75
"""Exit status of a process that ends because another one is lost or hangs; sysexits'
EX_TEMPFAIL, as the same command may succeed when it is started again."""


class InputError(ValueError):
    """Something given cannot be used; the message says what to do about it."""


class LostError(RuntimeError):
    """Another process is lost, and this one cannot go on without it."""
