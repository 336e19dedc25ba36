"""The one training loop, and all that a command of any task needs."""
