"""The exit statuses by which the launcher's processes tell it why they end."""

USAGE_EXIT = 2
"""Exit status of a command line that cannot be used, by argparse, tyro and Python."""

LOST_EXIT = 75
"""Exit status of a process that ends because another one is lost or hangs; sysexits'
EX_TEMPFAIL, as the same command may succeed when it is started again."""
