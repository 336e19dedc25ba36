"""Transformations of workers' own gradients, where Optax has them for agreed ones."""
