"""Optimizers, one file a paper; what papers share is in `parts`."""
