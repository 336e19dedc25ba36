"""The task of finding answers in texts."""
