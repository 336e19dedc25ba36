"""What the launcher refuses, and what its processes tell it by their exit status."""

LOST_EXIT = 75
"""Exit status of a process that ends because another one is lost or hangs; sysexits'
EX_TEMPFAIL, as the same command may succeed when it is started again."""


class UsageError(ValueError):
    """The command line cannot be used; the message says what to do about it."""
