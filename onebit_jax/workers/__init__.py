"""Worker axes, worker-local state and its placement; knows no exchange."""
