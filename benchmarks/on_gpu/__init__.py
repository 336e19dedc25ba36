"""All that waits for a GPU, in one command."""
