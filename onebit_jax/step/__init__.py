"""Each worker's own gradients, and a whole training step."""
